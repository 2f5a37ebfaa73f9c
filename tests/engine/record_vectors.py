"""Record what transformers computes for the small models of `test_pooling.py`, in float32 on the CPU.

`python -m tests.engine.record_vectors PYTHON` writes the recording. PYTHON is one that has torch and
transformers; it was made with 2.13.0 and 5.24.0.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any

RECORDING = Path(__file__).with_name("recorded_vectors.json")
SHAPE = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "eos_token_id": 1}
#: Token ids of texts of unequal lengths; none is the end token that pads.
TEXTS = [Random(n).choices(range(2, 500), k=n) for n in (7, 1, 40, 23, 22, 90)]
SCORED = [17, 33]  #: tokens for no and yes


def write(folder: Path) -> Path:
    from .small_models import write_model

    return write_model(folder, seed=11, attentive=True, **SHAPE)  # type: ignore[arg-type]


def reference(folder: str) -> dict[str, Any]:
    """Run in the other Python: one text at a time, so that nothing is padded."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    found: dict[str, Any] = {"last": [], "mean": [], "cls": [], "scores": []}
    with torch.no_grad():
        for text in TEXTS:
            states = model.model(torch.tensor([text])).last_hidden_state[0]
            logits = model.lm_head(states[-1])
            each = {"last": states[-1], "mean": states.mean(0), "cls": states[0], "scores": logits[SCORED]}
            for kind, vector in each.items():
                found[kind].append([float(f"{number:.6g}") for number in vector.tolist()])
    return found


def record(python: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        command = [python, __file__, "--reference", folder]
        RECORDING.write_bytes(subprocess.run(command, check=True, capture_output=True).stdout)


if __name__ == "__main__":
    if sys.argv[1] == "--reference":
        print(json.dumps(reference(sys.argv[2])))
    else:
        record(sys.argv[1])
