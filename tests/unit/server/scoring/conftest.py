import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.unit.server.scoring.chat_templates import Served, described


@pytest.fixture
def served(random_model: Path, byte_fallback_model: Path, tmp_path_factory) -> Served:
    """Makes a folder with a chat template, a tokenizer that has its special tokens, and a configuration."""

    def make(template: str, source: Path | None = None) -> Path:
        about, folder = described(template), tmp_path_factory.mktemp("served")
        source = source or (byte_fallback_model if about.get("tokenizer") else random_model)
        tokenizer = AutoTokenizer.from_pretrained(source)
        tokenizer.add_special_tokens(
            {"additional_special_tokens": about.get("special_tokens", [])}
            | {name: about[name] for name in ("bos_token", "eos_token") if name in about}
        )
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
        (folder / "config.json").write_bytes((source / "config.json").read_bytes())
        ends = tokenizer.convert_tokens_to_ids([about.get("end", "<|im_end|>"), tokenizer.eos_token])
        (folder / "generation_config.json").write_text(
            json.dumps({"eos_token_id": [end for end in ends if end is not None]})
        )
        return folder

    return make
