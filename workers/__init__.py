"""Prefill and decode workers: engine plus hand-off. Knows neither ray nor HTTP."""
