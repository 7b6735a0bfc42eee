"""The peer's side of `trl_steps.py` and `trl_curve.py`: steps of TRL's GRPO. Run by a Python that has TRL; imports
nothing of ours.

Settings are those that TRL recommends for speed where a model fits: no gradient checkpointing, the whole share of an
update in one batch up to 32,768 tokens, old log-probs only because two updates share a generation. Prints one line of
JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

STARTED = time.time()


def main(settings: dict) -> None:
    """Train for `settings["steps"]` steps of as many updates each."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(settings["threads"])
    times, lengths, curve, learning = [], [], {}, settings.get("learning")

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            times.append(time.time())
            if learning and state.global_step % learning["every"] == 0:
                curve[state.global_step] = accuracy(kwargs["model"])

    def reward(completions, completion_ids, **kwargs):
        lengths.extend(len(ids) for ids in completion_ids)
        if learning:
            return [float(text == truth) for text, truth in zip(completions, kwargs["truth"], strict=True)]
        return [sum(map(ord, text)) % 7 / 7 for text in completions]

    def accuracy(model):
        given = tokenizer([text for text, _ in learning["held_out"]], return_tensors="pt", padding=True)
        with torch.no_grad():
            whole = model.generate(
                **given, do_sample=False, max_new_tokens=settings["most"], eos_token_id=tokenizer.eos_token_id
            )
        found = tokenizer.batch_decode(whole[:, given["input_ids"].shape[1] :], skip_special_tokens=True)
        pairs = zip(found, learning["held_out"], strict=True)
        return sum(text == truth for text, (_, truth) in pairs) / len(found)

    samples = settings["prompts"] * settings["n"]
    update = samples // settings["updates"]
    batch = update
    while batch > 64 and batch * (8 + settings["most"]) > 40_000:
        batch //= 2
    config = GRPOConfig(
        output_dir=settings["output"],
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=update // batch,
        steps_per_generation=samples // batch,
        num_generations=settings["n"],
        max_completion_length=settings["most"],
        beta=settings["beta"],
        learning_rate=learning["lr"] if learning else 1e-6,
        warmup_steps=learning["warmup"] if learning else 0,
        loss_type="bnpo" if learning else "dapo",  # the mean over the tokens of an update, as ours is there
        max_steps=settings["updates"] * settings["steps"],
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        logging_steps=10_000,
        disable_tqdm=True,
        seed=settings.get("seed", 1),
    )
    tokenizer = AutoTokenizer.from_pretrained(settings["model"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    truths = learning["truths"] if learning else [""] * len(settings["texts"])
    rows = zip(settings["texts"], truths, strict=True)
    dataset = Dataset.from_list([{"prompt": prompt, "truth": truth} for prompt, truth in rows])
    trainer = GRPOTrainer(
        model, reward, args=config, train_dataset=dataset, processing_class=tokenizer, callbacks=[Clock()]
    )
    if learning:
        curve[0] = accuracy(model)
    begun = time.time()
    trainer.train()
    ends = times[settings["updates"] - 1 :: settings["updates"]]
    seconds = [end - before for before, end in zip([begun, *ends], ends, strict=False)]
    print(json.dumps({"seconds": seconds, "first": ends[0] - STARTED, "lengths": lengths, "curve": curve}))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
