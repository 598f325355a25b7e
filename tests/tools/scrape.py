"""`/metrics` read back: values by name and labels, and what they say about what is held."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from deployments.metrics import METRICS

__all__ = ["Scrape", "parse"]

_WORKER_ROLES = ("decode", "prefill")
_HELD_STATES = ("reserved", "used", "quarantined")
_ENDPOINTS = ("completions", "chat_completions")
_SAMPLES = frozenset(name for metric in METRICS.values() for name in metric.sample_labels)

Key = tuple[str, frozenset[tuple[str, str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrape:
    """One scrape."""

    samples: Mapping[Key, float]

    def value(self, name: str, **labels: str) -> float:
        """The sum of the samples with these labels among theirs; KeyError for no such metric."""
        if name not in _SAMPLES:
            raise KeyError(name)
        wanted = set(labels.items())
        return sum(
            value for (key, has), value in self.samples.items() if key == name and wanted <= has
        )

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """The sums of a metric's samples by the value of one label, zeros left out."""
        values = {dict(labels)[label] for key, labels in self.samples if key == name}
        sums = {value: self.value(name, **{label: value}) for value in sorted(values)}
        return {value: total for value, total in sums.items() if total}

    def blocks(self, role: str, state: str) -> float:
        """Blocks of a role's pool in a state."""
        return self.value("baton_kv_blocks", role=role, state=state)

    def available(self, role: str) -> float:
        """Blocks of a role's pool that nobody holds: free, or cached and evicted on demand."""
        return self.blocks(role, "free") + self.blocks(role, "cached")

    def workers(self, role: str) -> set[str]:
        """The workers of a role that answered the scrape."""
        return {
            dict(labels)["worker"]
            for name, labels in self.samples
            if name == "baton_kv_blocks" and ("role", role) in labels
        }

    def has_role(self, role: str) -> bool:
        """Whether a worker of the role answered the scrape."""
        return self.blocks(role, "total") > 0

    def is_idle(self) -> bool:
        """Whether both workers answered and nothing of any request is left anywhere."""
        return all(map(self.has_role, _WORKER_ROLES)) and not self.held()

    def held(self) -> dict[str, float]:
        """Everything that a request holds, by name; empty when idle (INV-CONSERVE included)."""
        counts = {
            f"{role} blocks {state}": self.blocks(role, state)
            for role in _WORKER_ROLES
            for state in _HELD_STATES
        }
        for role in _WORKER_ROLES:
            missing = self.blocks(role, "total") - self.available(role)
            counts[f"{role} blocks missing"] = missing
            counts[f"{role} sequences"] = self.value("baton_sequences", role=role)
            counts[f"{role} queue"] = self.value("baton_queue_length", role=role)
        counts["transfers"] = self.value("baton_transfers_active")
        counts["leases"] = self.value("baton_leases_active")
        for endpoint in _ENDPOINTS:
            counts[f"in flight {endpoint}"] = self.value(
                "baton_requests_in_flight", endpoint=endpoint
            )
        return {name: count for name, count in counts.items() if count}

    def relevant(self) -> str:
        """What is held and which workers answered, for a failed wait."""
        roles = [role for role in _WORKER_ROLES if self.has_role(role)]
        return f"answering: {roles}; held: {self.held()}"


def parse(text: str) -> Scrape:
    """A scrape from Prometheus' text format."""
    samples = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    return Scrape(samples=samples)
