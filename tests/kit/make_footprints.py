"""Measures the footprints that golden plans are made from, and writes them beside those plans.

    python tests/kit/make_footprints.py

Two models: the recommender as configured, and with a GPT-2 base (124 M parameters, random weights, frozen) over the
texts of about 8000 users and items, near to what a published guide has. Takes a minute, and 1 GB for a while.
"""

import dataclasses
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from wellfed.config.compose import compose  # noqa: E402
from wellfed.contract import FEATURE_MODES  # noqa: E402
from wellfed.observe.hardware.detect import machine  # noqa: E402
from wellfed.observe.hardware.profiles import with_cards  # noqa: E402
from wellfed.run.objects import datasets  # noqa: E402
from wellfed.run.planner import Planner  # noqa: E402

OUT = ROOT / "tests" / "plan" / "golden" / "footprints.json"


def gpt2_base(folder: Path) -> str:
    """GPT-2 base of random weights and a tokenizer of whole words, as ``save_pretrained`` leaves them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2Model, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    GPT2Model(GPT2Config()).save_pretrained(folder)
    return str(folder)


def measured(*overrides: str) -> dict:
    """Facts of data and model, and the footprint of each way, for a step of bf16-mixed on a card."""
    composed = compose(["gpu=8gb", *overrides])
    facts, _ = with_cards(machine(), "8gb", 7.2, 1)
    planner = Planner.start(composed, facts)
    estimate = planner.estimate(planner.rough())
    return {
        "overrides": [text for text in overrides if "pretrained" not in text],
        "data": dataclasses.asdict(datasets.data_facts(planner.parts)),
        "model": dataclasses.asdict(planner.model),
        "footprints": {
            f"{mode}/{checkpointed}": dataclasses.asdict(estimate(mode, checkpointed))
            for mode in FEATURE_MODES
            for checkpointed in (False, True)
        },
    }


def _a_line_each(model: dict) -> str:
    """JSON with a line for each footprint."""
    rest = {name: value for name, value in model.items() if name != "footprints"}
    ways = [f"{json.dumps(way)}: {json.dumps(each)}" for way, each in model["footprints"].items()]
    return json.dumps(rest)[:-1] + ', "footprints": {\n' + ",\n".join(ways) + "}}"


def main() -> None:
    """Writes the file."""
    with tempfile.TemporaryDirectory() as folder:
        guide = ["workload.data.scale=0.65", "workload.model.max_tokens=64"]
        found = {
            "recsys": measured("workload=recsys"),
            "recsys_gpt2": measured(*guide, f"workload.model.pretrained={gpt2_base(Path(folder) / 'gpt2')}"),
        }
    models = [f"{json.dumps(name)}: {_a_line_each(model)}" for name, model in found.items()]
    OUT.write_text("{" + ",\n".join(models) + "}\n", encoding="utf-8")
    for name, each in found.items():
        print(name, each["data"], each["model"])
        for way, footprint in each["footprints"].items():
            print(" ", way, {key: value for key, value in footprint.items() if isinstance(value, (int, str))})


if __name__ == "__main__":
    main()
