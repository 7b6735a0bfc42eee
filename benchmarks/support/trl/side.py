"""The peer's side of `trl_steps`: GRPO steps in TRL, run with a Python in which TRL is installed
but this project is not.

Uses the settings that TRL recommends for speed if the model fits: no gradient checkpointing, one
batch per update of up to 40,000 tokens, and old log-probs only because two updates share a
generation. Prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

STARTED = time.time()
PROMPTS = 64
SAMPLES = 8  # of a prompt
UPDATES = 2  # of a step


def main(settings: dict) -> None:
    """Train the model in the working directory for `settings["steps"]` steps."""
    import torch
    import yaml
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(os.cpu_count())
    times = []
    lengths = []

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            times.append(time.time())

    def reward(completions, completion_ids, **kwargs):
        lengths.extend(len(ids) for ids in completion_ids)
        return [sum(map(ord, text)) % 7 / 7 for text in completions]

    samples = PROMPTS * SAMPLES
    update = samples // UPDATES
    batch = update
    while batch > 64 and batch * (8 + settings["most"]) > 40_000:
        batch //= 2
    fixed = yaml.safe_load(Path(__file__).with_name("trl.yaml").read_text())
    config = GRPOConfig(
        **fixed,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=update // batch,
        steps_per_generation=samples // batch,
        num_generations=SAMPLES,
        max_completion_length=settings["most"],
        beta=settings["beta"],
        max_steps=UPDATES * settings["steps"],
    )
    tokenizer = AutoTokenizer.from_pretrained("model", padding_side="left")
    model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
    dataset = Dataset.from_list([{"prompt": prompt} for prompt in settings["texts"]])
    trainer = GRPOTrainer(
        model,
        reward,
        args=config,
        train_dataset=dataset,
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    begun = time.time()
    trainer.train()
    ends = times[UPDATES - 1 :: UPDATES]
    found = {
        "seconds": [end - before for before, end in pairwise([begun, *ends])],
        "first": ends[0] - STARTED,
        "mean_length": statistics.mean(lengths),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
