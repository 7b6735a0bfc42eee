"""All metrics that a run logs, with their unit and meaning. docs/metrics.md and the Prometheus
exporter's help texts are generated from this list.

A word in capitals is a placeholder, as in `timing_s/PHASE`. `SPREAD` stands for mean, max and min.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

SECTIONS = {
    "critic": "Scores, rewards and advantages",
    "response": "Lengths",
    "actor": "The policy's update",
    "rollout": "Sampling",
    "engine": "Engines",
    "reward": "Rewards and reward models",
    "val": "Held-out prompts (phase `val`)",
    "perf": "Speed and memory",
    "sync": "Weight syncs",
    "sft": "Supervised and reward training (phases `sft` and `reward`)",
    "other": "The run",
}


@dataclass(frozen=True)
class Line:
    """A metric, or all metrics whose names match a pattern."""

    section: str
    name: str
    unit: str
    meaning: str

    def matches(self, name: str) -> bool:
        """Return True if this line describes the metric."""
        return _pattern(self.name).fullmatch(name) is not None


@cache
def line_of(name: str) -> Line | None:
    """Return the line that describes a metric; None if there is none. An additional policy's
    metrics (`NAME/critic/score/mean`) use the first policy's descriptions.
    """
    for described in (name, name.partition("/")[2]):
        for line in LINES:
            if line.matches(described):
                return line
    return None


def table() -> str:
    """Return docs/metrics.md."""
    parts = [_TOP]
    for section, title in SECTIONS.items():
        parts += [f"## {title}", "| Metric | Unit | Meaning |\n|---|---|---|"]
        rows = [line for line in LINES if line.section == section]
        parts[-1] += "".join(f"\n| `{line.name}` | {line.unit} | {line.meaning} |" for line in rows)
    return "\n\n".join(parts) + "\n"


@cache
def _pattern(name: str) -> re.Pattern[str]:
    expression = re.escape(name)
    for word, of in _WORDS.items():
        # not \b, for which _ is a letter
        expression = re.sub(rf"(?<![A-Za-z]){word}(?![A-Za-z])", of, expression)
    return re.compile(expression)


# patterns for the words in capitals; a data source may contain slashes
_WORDS = {
    "SPREAD": "(?:mean|max|min)",
    "SOURCE": ".+",
    "VAL": "val(?:-[^/]+)?",
    "CORE": "val-core(?:-[^/]+)?",
    "NAME": "[^@]+",
    "PHASE": ".+",
    "ROLE": "[^/]+",
    "K": "[0-9]+",
    "VARIABLE": "(?:acc|reward)",
}
_TOP = """\
# Metrics

Each step is a line of `metrics.jsonl`: `step`, `phase` (train, val, sft or reward), `wall_time` and
the metrics below. All trackers receive the same metrics ([trackers.md](trackers.md)). A metric that
verl also logs has the same unit as in verl. Words in capitals are placeholders; `SPREAD` stands for
mean, max and min. An additional policy logs the same metrics under its own name
(`tester/critic/score/mean`).

This page is written by `python -m hybridflow.observe.metric_names > docs/metrics.md`."""

_TEXT = {
    "critic": """
critic/score/SPREAD | score | scores of the samples with a response, before KL penalties
critic/score_of/SOURCE/mean | score | mean score of one data source, if the step has several
critic/sampled_score/mean | score | mean score as sampled, if the flow replaced the scores
critic/rewards/SPREAD | reward | weighted scores minus KL penalties
critic/advantages/SPREAD | advantage | over sampled tokens
critic/returns/SPREAD | return | over sampled tokens, with a critic
critic/values/SPREAD | value | the critic's values over sampled tokens
critic/vf_explained_var | share | share of the returns' variance that the values explain, before
  the updates
critic/vf_loss | loss | the critic's loss, mean over its updates
critic/vf_clipfrac | share | values whose change was clipped
critic/vpred_mean | value | mean value during the updates
critic/grad_norm | norm | the critic's gradient before clipping, mean over its updates
critic/lr | rate | the critic's learning rate
critic/skipped_updates | updates | updates that were not applied, because a gradient was not
  finite
critic/solved_groups | share | prompts whose samples all score 1, which yield no gradient
critic/unsolved_groups | share | prompts whose samples all score 0, which yield no gradient
critic/pass@K | share | prompts that at least one of K samples solves, if all scores are 0 or 1
preference/accuracy | share | pairs of answers that the policy ranks in the order of their scores
preference/margin | nats | mean difference of log-ratios between best and worst answers
""",
    "response": """
response_length/SPREAD | tokens | tokens of the responses
response_length/clip_ratio | share | responses that ended at the length limit
response/aborted_ratio | share | responses that were aborted
prompt_length/SPREAD | tokens | tokens of the prompts
agent/turns/mean | turns | answers in a conversation
agent/turns/max | turns | maximum number of answers in a conversation
agent/tool_calls/mean | calls | tool calls in a conversation
agent/failed/mean | share | conversations whose loop failed
""",
    "actor": """
actor/loss | loss | total loss, mean over the updates
actor/pg_loss | loss | the policy loss only
actor/ppo_kl | nats | mean log-ratio between the step's first weights and the current ones
actor/first_ppo_kl | nats | the same at the first update, where it should be 0
actor/first_ppo_kl_max | nats | its largest absolute value so far
actor/pg_clipfrac | share | tokens whose ratio was clipped
actor/pg_clipfrac_lower | share | tokens with a negative advantage at the lower bound (dual clip)
actor/vespo_weight | weight | mean weight in the loss `vespo`
actor/entropy | nats | mean entropy of sampled tokens before the updates
actor/entropy_coef | coefficient | current entropy coefficient, if it is adaptive
actor/top_entropy_share | share | tokens that are trained on, with actor.top_entropy_share
actor/kl_loss | nats | KL penalty of the loss
actor/ref_kl | nats | mean log-ratio to the reference over sampled tokens
actor/reward_kl_penalty | nats | KL penalty in the reward, mean over samples
actor/reward_kl_penalty_coeff | coefficient | its coefficient
actor/distillation_loss | loss | the distillation term of the loss
teacher/top_mass | share | probability of the teacher's most likely tokens
actor/grad_norm | norm | gradient before clipping, mean over the updates
actor/lr | rate | learning rate of the last update
actor/skipped_updates | updates | updates that were not applied, because a gradient was not finite
actor/trainable_parameters | parameters | trainable weights; with LoRA, only the adapters
actor/router_aux_loss | loss | load-balancing loss of the experts' routers
actor/router_z_loss | loss | z-loss of the routers
actor/mtp/loss | nats | cross-entropy of the multi-token-prediction heads' targets, mean over depths
actor/mtp/accuracy | share | targets that a head finds most likely: an estimate of the share of
  drafted tokens that an engine accepts
actor/mtp/depth_K/loss | nats | the same by depth, with several heads
actor/mtp/depth_K/accuracy | share | the same by depth, with several heads
actor/mtp/grad_norm | norm | the heads' gradient before clipping, mean over the updates
actor/mtp/skipped_updates | share | updates of the heads that were not applied, because their
  gradient was not finite
actor/router_replay/tokens | token-layers | token-layers replayed in the step
actor/router_replay/mismatches | token-layers | token-layers routed to other experts than recorded
actor/router_replay/differing | share | token-layers for which the trainer's router differs from
  the engine's
actor/router_replay/drifted | share | token-layers for which the updated router differs from the
  recorded one
rollout_correction/weight | weight | mean importance weight between engine and trainer
rollout_correction/ess | share | effective sample size with these weights
rollout_correction/bounded | share | weights at their bound
rollout_correction/rejected | share | tokens that were rejected
rollout_correction/off_policy | share | tokens of samples excluded as too far off-policy
""",
    "rollout": """
rollout/logprob_diff/mean | nats | mean difference between engine and trainer log-probabilities
  of the same tokens
rollout/logprob_diff/max | nats | largest difference
rollout/mismatch/kl | nats | estimate (k1) of the KL divergence of the engine from the trainer
rollout/mismatch/k3 | nats | the same, estimated with k3
rollout/mismatch/chi2 | ratio | mean squared ratio minus 1
rollout/mismatch/ess | share | effective sample size if tokens were weighted by the ratio
rollout/mismatch/NAME_quarter | nats | mean difference in a quarter of the response
rollout/mismatch/K_syncs_behind | nats | mean difference of tokens sampled by weights this many
  syncs old
rollout/staleness/mean | versions | weight versions between sampling and training
rollout/staleness/max | versions | the largest of these
rollout/steps_ahead | steps | steps for which prompts are submitted in advance
rollout/groups_left | groups | finished or running groups kept for a later step
rollout/prompts_handed_out | prompts | prompts submitted for the step with tail batching
rollout/prompts_cut_off | prompts | cut-off prompts that wait to be regenerated
rollout/restarts | restarts | restarts of all engines so far
sampling/batches | batches | batches sampled for the step (dynamic sampling)
sampling/groups_differ | share | groups whose scores differ
sampling/groups_filled | groups | groups added to reach the batch size
sampling/groups_surplus | groups | useful groups beyond the batch size
sampling/groups_thrown_away | groups | groups with equal scores that were discarded
sampling/tokens_thrown_away | tokens | tokens of discarded groups
sampling/tokens_used | share | sampled tokens that are trained on
""",
    "engine": """
engine/tokens_per_s | tokens/s | tokens generated by an engine while it has requests, mean over
  the engines; training and validation
engine/idle_share | share | share of the time since the previous step during which an engine
  had no requests
engine/running/mean | requests | requests that an engine runs concurrently, while it has any; this
  metric and the next five are logged only if the engine reports them
engine/queue/mean | requests | requests queued in an engine
engine/queue/max | requests | maximum number queued in an engine
engine/kv_use/mean | share | share of an engine's KV cache in use
engine/kv_use/max | share | maximum share in use
engine/prefix_hits | share | prompt tokens found in the prefix cache, over the finished requests
engine/accepted_drafts | share | drafted tokens that the model accepted, with rollout.speculative;
  over the finished requests
engine/accepted_drafts/depth_K | share | passes that accepted the first K tokens of their draft, if
  rollout.speculative.num_steps is more than 1
engine/tokens_per_pass | tokens | mean accepted length: tokens from each pass that verifies a draft,
  i.e. the accepted tokens plus one
""",
    "reward": """
reward_extra/NAME/SPREAD | the reward's | a number that the reward returns in addition to
  the score
reward/failed | share | rows whose scoring failed
reward/overlong | share | responses with a penalty for their length
reward_model/score/SPREAD | score | raw scores of the reward model
reward_model/counted/SPREAD | score | its scores after squash and weight
reward_model/agreement | share | pairs that the reward model ranks like the verifier
reward_model/share | share | share of the reward's variance due to the reward model
reward_model/NAME | the update's | loss, accuracy, margin, grad_norm and lr of a reward model
  that a flow trains
""",
    "val": """
VAL/score | score | mean score
VAL/accuracy | share | the same, if every score is 0 or 1
VAL/SOURCE/score | score | mean score of a data source
VAL/SOURCE/accuracy | share | the same, if every score is 0 or 1
VAL/mean@K | score | mean score over K answers to each prompt
VAL/best@K | score | expected best of K answers
VAL/worst@K | score | expected worst of K answers
VAL/pass@K | share | prompts that at least one of K answers solves
VAL/maj@K | score | score of the most frequent of K answers
VAL/SOURCE/mean@K | score | the same by data source
VAL/SOURCE/best@K | score | the same by data source
VAL/SOURCE/worst@K | score | the same by data source
VAL/SOURCE/pass@K | share | the same by data source
VAL/SOURCE/maj@K | score | the same by data source
VAL/response_length/mean | tokens | mean length of the answers
VAL/reward_extra/NAME/mean | the reward's | mean of a number that the reward returns in
  addition to the score
VAL/agent/turns/mean | turns | answers in a conversation
VAL/agent/tool_calls/mean | calls | tool calls in a conversation
VAL/agent/failed/mean | share | conversations whose loop failed
CORE/SOURCE/VARIABLE/mean@K | score | verl's main metric: mean over N answers of `acc`, if the
  reward returns it, else of the score (`reward`)
CORE/SOURCE/VARIABLE/best@K/mean | score | expected best of N answers
CORE/SOURCE/VARIABLE/maj@K/mean | score | score of the most frequent of N answers
""",
    "perf": """
perf/total_num_tokens | tokens | prompt and response tokens of the step
perf/time_per_step | s | duration of the step
perf/throughput | tokens/s per device | total_num_tokens / time_per_step / devices of the run
  (processes on CPUs)
perf/mfu/actor | share | model FLOPs utilization of the policy's devices during its update: 3
  forward passes' operations by the planner's formulas, without recomputation; not logged on CPUs
  and unknown GPUs
perf/mfu | share | the same operations over the whole step and all devices
timing_s/PHASE | s | duration of a phase of the step; `step` is the whole step
timing_per_token_ms/PHASE | ms | milliseconds per token: response tokens for gen, all tokens for
  the others
perf/max_memory_allocated_gb | GiB | peak allocated memory, largest rank
perf/max_memory_allocated_gb/PHASE | GiB | the same by worker method
perf/max_memory_reserved_gb | GiB | peak memory reserved by torch, largest rank
perf/offloaded_gb/ROLE | GB | data of a role that is offloaded to host memory, largest rank
controller/share | share | share of the step during which the driver waited for neither workers
  nor engines
""",
    "sync": """
sync/seconds | s | duration of the weight sync
sync/bytes | bytes | weights received by the engines
sync/engines_stale | engines | engines that did not receive the weights
sync/merged_gb | GB | copies of merged adapter weights, largest rank
""",
    "sft": """
sft/loss | nats | mean loss per token
sft/grad_norm | norm | gradient before clipping
sft/lr | rate | learning rate
reward/loss | nats | loss of reward training
reward/accuracy | share | pairs whose chosen answer scores higher
reward/margin | score | mean difference between chosen and rejected answers
reward/grad_norm | norm | gradient before clipping
reward/lr | rate | learning rate
""",
    "other": """
training/global_step | step | number of the step
training/epoch | epoch | epoch of the step's first prompt, from 0
trainer/restarts | restarts | restarts of the training ranks so far
flow/NAME | the flow's | a number that a flow records with run.record(NAME=...)
""",
}


def _lines() -> tuple[Line, ...]:
    found = []
    for section, text in _TEXT.items():
        for row in text.strip().replace("\n  ", " ").splitlines():
            name, unit, meaning = map(str.strip, row.split("|"))
            found.append(Line(section, name, unit, meaning))
    return tuple(found)


LINES = _lines()

if __name__ == "__main__":
    print(table(), end="")
