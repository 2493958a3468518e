"""The settings of each kind of stage. One class per kind; the line under a field is its documentation."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from bridge.config.base import Settings, matching
from bridge.config.grading import Grading

TIME = r"(?=.*[1-9])(\d+d)?(\d+h)?(\d+m)?(\d+s)?"

Positive = Annotated[int, Field(gt=0)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[tuple[Beta, Beta], Field(strict=False)]


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


# An input names another stage (an edge of the graph), `$model`, or a path.
Input = Annotated[str, Field(min_length=1)]
Inputs = Annotated[list[Input], Field(min_length=1), BeforeValidator(_as_list)]


Size = Annotated[str, AfterValidator(matching(r"[1-9]\d*[KMGT]", "a size such as 32G"))]
Time = Annotated[str, AfterValidator(matching(TIME, "a time such as 2d, 12h, 90m or 1h30m"))]
MEMORY = ("mem", "mem_per_cpu", "mem_per_gpu")


def seconds(time: str) -> int:
    """A time such as `1h30m` in seconds."""
    units = {"d": 86400, "h": 3600, "m": 60, "s": 1}
    return sum(int(number) * units[unit] for number, unit in re.findall(r"(\d+)([dhms])", time))


class Resources(Settings):
    """What one element of the stage needs. Anything left out comes from the profile."""

    cpus: Positive | None = None
    """CPU cores of the element on each node; shared among its processes, and so their number of threads."""
    gpus: Annotated[int, Field(ge=0)] | None = None
    """GPUs on each node."""
    nodes: Positive | None = None
    """Nodes. Default: 1. Only `sft` runs on several."""
    processes: Positive | None = None
    """Processes on each node that train together (data parallel, through torchrun). Default: one for each GPU in `sft`,
    else 1. Only `sft` runs in several. The result is that of one process, up to rounding."""
    mem: Size | None = None
    """Memory on each node, such as `32G`. Of the three memory settings one may be given; it replaces the profile's."""
    mem_per_cpu: Size | None = None
    """Memory for each CPU core, for clusters that want it said so."""
    mem_per_gpu: Size | None = None
    """Memory for each GPU, for clusters that want it said so."""
    time: Time | None = None
    """Wall-clock limit of one attempt, such as `2d`, `12h`, `90m` or `1h30m`."""
    max_attempts: Positive | None = None
    """How often one submission of the element may start (preempted, out of time, node lost …) before it counts as
    failed. Default: 20. A resume begins to count anew."""
    max_total_time: Time | None = None
    """Wall-clock limit of all attempts of one submission together. Default: none."""
    quiet: Time | None = None
    """`status` says so when a running stage made no progress for this long. Default: 30m."""
    max_quiet: Time | None = None
    """A stage that made no progress for this long is ended and counts as failed. Default: never."""

    @model_validator(mode="after")
    def _one_memory(self) -> Resources:
        given = [name for name in MEMORY if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"give only one of {' and '.join(given)}: Slurm takes one")
        return self


class Behavior(Settings):
    """What BRIDGE injects into a worked solution (docs/igsm.md)."""

    reflection: Fraction = 0.0
    """Probability of trying a quantity that cannot be known yet, noticing it, and going back."""
    subgoal: bool = False
    """Write the arithmetic as a chain of one-operation rewrites."""
    analysis: Annotated[int, Field(ge=0, le=4)] = 0
    """How often the premise that defines a quantity is restated before it is used: 0 never … 4 almost always."""


BEHAVIORS: dict[str, Behavior] = {
    "vanilla": Behavior(),
    "bridge": Behavior(reflection=0.1, subgoal=True, analysis=2),
}


def _named_behavior(value: object) -> object:
    if isinstance(value, str):
        if value not in BEHAVIORS:
            raise ValueError(f"unknown behavior {value!r}; known: {', '.join(BEHAVIORS)}, or a mapping")
        return BEHAVIORS[value]
    return value


class Starts(Settings):
    """R³'s start states: where a worked solution is cut, so that sampling begins with its first steps given."""

    mode: Literal["mixed", "staged"] = "mixed"
    """All start states all the time (R³), or one after the other, from the last step to the bare question."""
    m: Annotated[int, Field(ge=2, le=100)] = 5
    """Start states of each worked solution: after 0, 1/m, 2/m … of its pieces."""
    unit: Literal["line", "sentence", "token"] = "line"
    """What the pieces are. Cuts are between tokens, whatever the unit."""
    from_question: bool = True
    """Whether the bare question is one of the start states."""


class StageSettings(Settings):
    """What every stage has."""

    input_kinds: ClassVar[dict[str, str]] = {}
    """Input field → the kind of artifact that it must name."""
    output: ClassVar[str]
    """The kind of artifact that the stage makes."""

    resources: Resources = Resources()
    """What one element needs; does not change what is computed, so it is no part of the fingerprint."""


class DataSettings(StageSettings):
    """Write one split of the experiment's task as Parquet."""

    output: ClassVar[str] = "dataset"

    kind: Literal["data"]
    split: Literal["sft", "rl", "val", "test"]
    """Which split. The splits of a task never share a problem (but see `rl_share` of public data). `sft` rows hold
    worked solutions."""
    size: Positive | None = None
    """Number of rows. Without it, all that a public data set has; other tasks need it."""
    behavior: Annotated[Behavior, BeforeValidator(_named_behavior)] = Behavior()
    """`vanilla`, `bridge`, or a mapping of behavior settings. Only the wording changes, never the problems."""
    solution_orders: Positive = 1
    """igsm, split `sft`: each problem fills so many rows, its solution in another order in each (RC-Aug has 4)."""
    premise_orders: Positive = 1
    """igsm, split `sft`: each problem fills so many rows, its premises in another order in each, with the same solution
    (PP-Aug has 4)."""
    tokenizer: bool = False
    """Also build a tokenizer from the task's own vocabulary, for a model that starts from scratch."""
    seed: Seed = 0
    """Draws the problems and the wording. It does not follow the experiment's seed: all seeds train on one data set."""

    @model_validator(mode="after")
    def _orders_are_for_training(self) -> DataSettings:
        if self.split != "sft" and self.solution_orders * self.premise_orders > 1:
            raise ValueError("solution_orders and premise_orders repeat problems, which only split sft may do")
        return self


class InitSettings(StageSettings):
    """A small Qwen2-architecture model from random init. Appears by itself when `model` is `{init: {...}}`."""

    input_kinds: ClassVar[dict[str, str]] = {"tokenizer": "dataset"}
    output: ClassVar[str] = "model"

    kind: Literal["init"]
    tokenizer: Input
    """The data stage whose tokenizer (and so whose vocabulary) the model takes."""
    hidden: Positive = 96
    """Width of the residual stream; a multiple of `heads`."""
    layers: Positive = 3
    """Transformer blocks."""
    heads: Positive = 4
    """Attention heads; a multiple of `kv_heads`."""
    kv_heads: Positive = 2
    """Heads of keys and values (grouped-query attention)."""
    ffn: Positive = 256
    """Width of the feed-forward layer."""
    positions: Positive = 1024
    """Longest sequence in tokens."""
    init_std: Annotated[float, Field(gt=0)] = 0.05
    """Standard deviation of the random weights."""
    seed: Seed = 0
    """Draws the weights. Default: the experiment's seed."""

    @model_validator(mode="after")
    def _heads_divide(self) -> InitSettings:
        if self.hidden % self.heads or self.heads % self.kv_heads:
            raise ValueError("hidden must be a multiple of heads, and heads a multiple of kv_heads")
        return self


class OptimizerSettings(StageSettings):
    """AdamW, its schedule, and the bookkeeping that SFT and RL share."""

    lr: Annotated[float, Field(gt=0)]
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after warm-up."""
    warmup: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps of linear warm-up."""
    min_lr: Fraction = 0.0
    """The learning rate at the last step, as a fraction of `lr` (linear and cosine)."""
    betas: Betas = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """AdamW's decoupled weight decay."""
    clip: Annotated[float, Field(gt=0)] = 1.0
    """Largest gradient norm."""
    micro_batch: Positive = 8
    """Sequences in one forward pass. Changes memory and speed, not the result."""
    save_every: Annotated[int, Field(ge=0)] = 50
    """Steps between training checkpoints for resuming; 0 keeps only the last one."""
    keep_every: Annotated[int, Field(ge=0)] = 0
    """Steps between models kept in `steps/` of the artifact, made while the training goes on; 0 keeps none."""
    log_every: Positive = 10
    """Steps between lines of metrics.jsonl and of the log."""
    samples_every: Annotated[int, Field(ge=0)] = 0
    """Steps between sample tables (prompt, completion …); 0 writes none."""
    wandb: str | None = None
    """W&B project to log to. Offline unless WANDB_MODE says otherwise."""
    seed: Seed = 0
    """Draws the order of the rows and every sample. Default: the experiment's seed."""


class SftSettings(OptimizerSettings):
    """Supervised fine-tuning on the worked solutions of a dataset."""

    input_kinds: ClassVar[dict[str, str]] = {"model": "model", "data": "dataset", "eval_data": "dataset"}
    output: ClassVar[str] = "checkpoint"

    kind: Literal["sft"]
    model: Input
    """The model to start from: a stage, `$model`, or a path."""
    data: Input
    """The dataset to train on: a stage, or the path of an artifact, a .parquet or a .jsonl file (docs/data.md)."""
    eval_data: Input | None = None
    """A dataset with worked solutions to report the loss on."""
    eval_every: Positive = 100
    """Steps between two evaluations of the loss."""
    epochs: Positive | None = None
    """Passes over the data. Give this or `steps`."""
    steps: Positive | None = None
    """Optimizer steps. Give this or `epochs`."""
    batch: Positive = 128
    """Sequences in one optimizer step."""
    loss_on: Literal["response", "all"] = "response"
    """Which tokens count: the response with its end-of-sequence token, or the prompt as well."""
    max_length: Positive = 2048
    """Longest sequence in tokens; longer ones are cut on the right and counted."""

    @model_validator(mode="after")
    def _one_length(self) -> SftSettings:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give exactly one of epochs and steps")
        return self


class RlSettings(OptimizerSettings):
    """Reinforcement learning with a verifiable reward (GRPO)."""

    input_kinds: ClassVar[dict[str, str]] = {"model": "model", "data": "dataset"}
    output: ClassVar[str] = "checkpoint"

    kind: Literal["rl"]
    model: Input
    """The model to start from: a stage, `$model`, or a path."""
    data: Input
    """The dataset to train on: a stage, or the path of an artifact, a .parquet or a .jsonl file (docs/data.md)."""
    algorithm: Literal["grpo"] = "grpo"
    """How advantages and the loss are made (docs/training.md)."""
    steps: Positive
    """Rollout batches. Each gives `minibatches` optimizer steps."""
    prompts: Positive = 32
    """Prompts in one rollout batch."""
    group: Annotated[int, Field(ge=2)] = 8
    """Completions of each prompt."""
    minibatches: Positive = 1
    """Optimizer steps on each rollout batch."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature; the same one is used for the log-probabilities of the loss."""
    max_new_tokens: Positive = 512
    """Longest completion in tokens."""
    clip_ratio: Annotated[float, Field(gt=0)] = 0.2
    """The probability ratio is clipped to 1 ± this."""
    kl: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the k3 estimate of KL(policy ‖ starting model)."""
    starts: Starts | None = None
    """Begin inside the worked solutions of the data (R³, docs/tasks.md); without it, at the question."""
    mask_truncated: bool = False
    """Leave completions that hit `max_new_tokens` out of the loss; otherwise they count with their reward."""
    format_reward: Annotated[float, Field(ge=0)] = 0.0
    """Added to the reward of a completion with one think block and one answer block."""
    format_rule: Literal["strict", "bridge"] = "strict"
    """`strict`: each tag once, and nothing after the answer block. `bridge`: what BRIDGE's own pattern lets pass."""
    grading: Grading = Grading()
    """What counts as the right answer, where people disagree."""
    rollout_batch: Positive = 256
    """Sequences that the sampler holds at once."""


class ConvertSettings(StageSettings):
    """A training checkpoint to a safetensors model. Appears by itself between the two."""

    input_kinds: ClassVar[dict[str, str]] = {"checkpoint": "checkpoint"}
    output: ClassVar[str] = "model"

    kind: Literal["convert"]
    checkpoint: Input
    """The stage or artifact whose checkpoint is converted."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the floating-point weights; `auto` keeps the stored one."""


class EvalSettings(StageSettings):
    """Sample, grade, score."""

    input_kinds: ClassVar[dict[str, str]] = {"model": "model", "data": "dataset"}
    output: ClassVar[str] = "eval"

    kind: Literal["eval"]
    model: Inputs
    """One model or several; each is an element of its own."""
    data: Input
    """The problems: a stage, or the path of an artifact, a .parquet or a .jsonl file."""
    samples: Positive = 8
    """Answers sampled for each problem."""
    limit: Positive | None = None
    """Only the first so many problems."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """0 is greedy decoding."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the smallest set of tokens with this much probability."""
    max_new_tokens: Positive = 512
    """Longest answer in tokens."""
    grading: Grading = Grading()
    """What counts as the right answer, where people disagree; recorded with the score."""
    rollout_batch: Positive = 256
    """Sequences that the sampler holds at once. Changes memory and speed only."""
    seed: Seed = 0
    """Draws the answers. Default: the experiment's seed."""


Stage = Annotated[
    DataSettings | InitSettings | SftSettings | RlSettings | ConvertSettings | EvalSettings,
    Field(discriminator="kind"),
]
STAGE_KINDS: dict[str, type[StageSettings]] = {
    "data": DataSettings,
    "init": InitSettings,
    "sft": SftSettings,
    "rl": RlSettings,
    "convert": ConvertSettings,
    "eval": EvalSettings,
}
