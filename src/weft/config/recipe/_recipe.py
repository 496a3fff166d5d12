"""The recipe says what to train, and nothing about devices."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

from weft.config.document import HIDDEN, Flattened, Rules, dump, problem_error
from weft.config.recipe._adapter import AdapterRecipe
from weft.config.recipe._on_failure import OnFailure
from weft.config.recipe._shapes import ConvNetShape, DecoderShape, EncoderShape, MlpShape, ReferenceShape
from weft.errors import BadSetting, RecipeError, did_you_mean

BUILT_IN_LOSSES = ("tokens", "classes", "regression")
COMPRESSIONS = ("bf16", "fp16", "fp8", "int8", "int4", "onebit", "topk", "powersgd", "randomk", "signsgd")
"""Names that `permit.compression` knows."""

SHAPES: Mapping[str, type[ReferenceShape]] = {
    "decoder": DecoderShape,
    "encoder": EncoderShape,
    "mlp": MlpShape,
    "convnet": ConvNetShape,
}
_RULES = Rules(RecipeError)
_STORE = re.compile(r"[a-z][a-z0-9]*://[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9._=-]+)*/?", re.ASCII)
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")

Scalar = str | int | float | bool
Precision = Literal["fp32", "fp64", "bf16", "fp16"]
SplitKind = Literal[
    "column",
    "row",
    "vocab",
    "sequence",
    "expert",
    "channel_out",
    "channel_in",
    "channels",
    "replicate",
    "heads",
    "features",
    "gathered_input",
    "gather",
    "part",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecipe:
    """The model: exactly one of `reference`, `hf` and `factory`."""

    reference: Literal["decoder", "encoder", "mlp", "convnet"] | None = None
    """A model that Weft brings along; its sizes stand beside it."""
    shape: ReferenceShape | None = field(default=None, metadata={"flattened": Flattened("reference", SHAPES)})
    """Sizes of a reference model; in TOML its keys stand directly in `[model]`."""
    hf: str | None = None
    """A local Hugging Face folder, or a `config.json`."""
    factory: str | None = None
    """`package.module:function`, called with `arguments`, returns an `nn.Module` or a
    `weft.model.blueprint.Blueprint`."""
    arguments: Mapping[str, Scalar] = field(default_factory=dict[str, Scalar], hash=False)
    """Keyword arguments of the factory."""
    sequence_length: int | None = None
    """Tokens per sample, for `hf` and `factory` models (a reference shape has its own); of models that listen to waves,
    values of one."""
    loss: str | None = None
    """`tokens`, `classes`, `regression`, or `package.module:function`; by default the model's own."""
    split: Mapping[str, SplitKind] = field(default_factory=dict[str, SplitKind], hash=False)
    """`[model.split]`: glob over module names → kind; wins over every other table."""
    propose_split: bool | None = None
    """Whether to find out by looking at the model's forward how layers split that no table covers (`weft describe`
    shows it). By default where nothing says how the model splits; prove it with `weft check`."""
    freeze: tuple[str, ...] = ()
    """Globs over parameter names that are not trained."""
    adapter: AdapterRecipe | None = None
    """`[model.adapter]`: train adapters alone, and leave the model's own weights as they are."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        if self.reference is None and self.shape is not None:
            kind = next(name for name, cls in SHAPES.items() if isinstance(self.shape, cls))
            object.__setattr__(self, "reference", kind)
        self._check_source()
        if self.reference is not None:
            self._check_reference()
        if self.factory is not None and not _FUNCTION.fullmatch(self.factory):
            raise _RULES.refuse(self, "factory", 'is not "package.module:function".')
        if self.arguments and self.factory is None:
            raise _RULES.refuse(self, "arguments", "are arguments of a factory, and this model has none.")
        if self.loss is not None and self.loss not in BUILT_IN_LOSSES and not _FUNCTION.fullmatch(self.loss):
            names = ", ".join(BUILT_IN_LOSSES)
            hint = did_you_mean(self.loss, BUILT_IN_LOSSES)
            raise _RULES.refuse(self, "loss", f'is neither one of {names} nor "package.module:function".{hint}')
        _RULES.at_least(self, 1, "sequence_length")
        if self.adapter is not None and self.freeze:
            raise _RULES.refuse(self, "freeze", "stands beside adapter, which freezes every weight. Remove it.")

    def _check_source(self) -> None:
        sources = [name for name in ("reference", "hf", "factory") if getattr(self, name) is not None]
        if not sources:
            problem = "is missing: a model has one of reference, hf and factory."
            raise RecipeError(f"reference {problem}", setting=BadSetting(("reference",), None, problem))
        if len(sources) > 1:
            raise _RULES.refuse(
                self, sources[1], f"stands beside {sources[0]}: a model has one of them. Remove the other."
            )

    def _check_reference(self) -> None:
        assert self.reference is not None
        shape_class = SHAPES[self.reference]
        if not isinstance(self.shape, shape_class):
            got = type(self.shape).__name__ if self.shape is not None else "no shape"
            raise _RULES.refuse(self, "reference", f"needs shape = {shape_class.__name__}(...), and has {got}.")
        if self.sequence_length is not None:
            has_own = any(item.name == "sequence_length" for item in fields(shape_class))
            problem = "belongs in the shape of a reference model" if has_own else f"means nothing to a {self.reference}"
            raise _RULES.refuse(self, "sequence_length", f"{problem}. Remove it.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """One corpus of the blend."""

    source: str
    """`stdlib` (the running Python's own source), `digits`, `synthetic`, or a path: a file or folder of text or of
    rows, prepared shards, images in a folder per class, or what `datasets` saved to disk."""
    weight: float = 1.0
    """Share of the samples, relative to the other sources."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        _RULES.above_zero(self, "weight")
        if not self.source.strip():
            raise _RULES.refuse(self, "source", 'is empty. Write "stdlib", "digits", "synthetic" or a path.')


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRecipe:
    """The samples: where they come from, and how they are read."""

    train: tuple[DataSource, ...] = (DataSource(source="stdlib"),)
    """Corpora, blended by weight."""
    validation: tuple[DataSource, ...] = ()
    """Empty: `validation_fraction` of the training documents, chosen by document hash."""
    validation_fraction: float = 0.01
    """Share of the training documents held out for evaluation."""
    tokenizer: str | None = None
    """A `tokenizer.json`; by default the one in the model's folder, or else a byte-level BPE of the model's vocabulary
    size, trained on the corpus."""
    documents: Literal["packed", "isolated"] = "packed"
    """`packed`: documents follow one another in a sample; `isolated`: attention and positions stop at their borders."""
    mask_fraction: float = 0.15
    """Share of tokens that a masked-language model must guess."""
    columns: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    """A field that is looked for in a row (one that the model takes, `image`, `label`, or `text`) → the column that has
    it, where the column has another name."""
    prefetch_workers: int = 1
    """Threads per data rank that read coming batches; 0: none, batches are read when they are needed."""
    cache: str | None = None
    """Folder of prepared shards; by default `~/.cache/weft`."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        if not self.train:
            raise _RULES.refuse(self, "train", 'is empty. Write [{ source = "stdlib" }].')
        _RULES.between(self, 0, 1, "validation_fraction")
        _RULES.above_zero(self, "mask_fraction")
        _RULES.between(self, 0, 1, "mask_fraction", below=False)
        _RULES.at_least(self, 0, "prefetch_workers")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecipe:
    """How many samples make a step."""

    global_batch_size: int
    """Samples (sequences, images) per optimizer step; does not change with the number of devices."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        _RULES.at_least(self, 1, "global_batch_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGroup:
    """Other settings for the parameters whose names match."""

    match: str
    """Glob over parameter names; the first group that matches wins."""
    learning_rate_scale: float = 1.0
    """Times the optimizer's learning rate."""
    weight_decay: float | None = None
    """None: the optimizer's."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        _RULES.at_least(self, 0, "learning_rate_scale", "weight_decay")
        if not self.match:
            raise _RULES.refuse(self, "match", 'is empty. Write a glob such as "*.bias".')


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRecipe:
    """How weights follow gradients."""

    name: Literal["adamw", "sgd", "adafactor", "lamb", "lars"] = "adamw"
    """The update rule."""
    learning_rate: float = 3e-4
    """Learning rate at its highest, after the warm-up."""
    weight_decay: float = 0.0
    """Pull of the weights towards 0, as the optimizer defines it: decoupled from the gradient for AdamW."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decays of the two moments (AdamW, LAMB)."""
    epsilon: float | None = None
    """None: what the method's authors use: 1e-8 (AdamW), 1e-6 (LAMB), 1e-30 (Adafactor).  SGD and LARS have none."""
    momentum: float = 0.9
    """SGD and LARS."""
    nesterov: bool = False
    """SGD only."""
    relative_step: bool = False
    """Adafactor only: step by max(1e-3, RMS of the parameter) x min(learning rate, 1/sqrt(step))."""
    max_grad_norm: float | None = 1.0
    """The whole gradient is scaled down to this norm when it is longer."""
    schedule: Literal["constant", "linear", "cosine", "warmup_stable_decay"] = "constant"
    """How the learning rate goes after the warm-up."""
    warmup_steps: int = 0
    """Steps in which the learning rate rises from 0."""
    decay_steps: int | None = None
    """`warmup_stable_decay`: steps of the last part; by default a fifth of the run."""
    final_learning_rate_ratio: float = 0.1
    """Learning rate at the end, relative to learning_rate."""
    batch_scaling: Literal["none", "linear", "square_root"] = "none"
    """Large-batch rule: the learning rate times (global_batch_size / base_batch_size) or its root."""
    base_batch_size: int | None = None
    """Global batch size that learning_rate was found for."""
    decay_one_dimensional: bool = False
    """Whether weight decay touches biases and norms (parameters with fewer than two dimensions)."""
    sparse_rule: Literal["sgd", "adagrad", "adam"] | None = None
    """How embeddings with sparse gradients are updated: only the rows that a step names, by plain SGD, Adagrad or Adam
    (with the betas and epsilon of AdamW).  None: by the optimizer itself, which only SGD without momentum can."""
    groups: tuple[ParameterGroup, ...] = ()
    """Other settings for some parameters."""
    average_decay: float | None = None
    """Decay of an exponential moving average of the weights, kept beside them and used by evaluation and export."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        _RULES.above_zero(self, "learning_rate", "epsilon", "max_grad_norm", "average_decay")
        _RULES.at_least(self, 0, "weight_decay", "warmup_steps")
        _RULES.at_least(self, 1, "decay_steps", "base_batch_size")
        _RULES.between(self, 0, 1, "momentum", "average_decay")
        _RULES.between(self, 0, 1, "final_learning_rate_ratio", below=False)
        for index, beta in enumerate(self.betas):
            if not 0 <= beta < 1:
                raise _RULES.refuse(self, "betas", "must be at least 0 and below 1.", index)
        self._check_used()
        self._check_scaling()

    @property
    def moments(self) -> int:
        """Elements of its state per parameter, masters left out; what Adafactor keeps is next to nothing."""
        return {"adamw": 2, "lamb": 2, "sgd": 1, "lars": 1, "adafactor": 0}[self.name]

    @property
    def cuts(self) -> Literal["anywhere", "parameter"]:
        """Return where data ranks may cut the parameters that they share out: Adafactor keeps
        statistics of whole rows."""
        return "parameter" if self.name == "adafactor" else "anywhere"

    @property
    def is_constant_rate(self) -> bool:
        """Whether the learning rate is the same in every step."""
        return self.schedule == "constant" and self.warmup_steps == 0

    @property
    def falls_along_cosine(self) -> bool:
        """Whether the learning rate falls slowly first and last, and not in a straight line."""
        return self.schedule == "cosine"

    @property
    def stays_before_decay(self) -> bool:
        """Whether the learning rate stays at its peak until the last `decay_steps`."""
        return self.schedule == "warmup_stable_decay"

    @property
    def schedule_line(self) -> str:
        """`cosine, 100 warm-up steps`."""
        return f"{self.schedule}, {self.warmup_steps} warm-up steps"

    def _check_used(self) -> None:
        """Refuse settings that this optimizer or schedule would ignore."""
        defaults = {item.name: item.default for item in fields(self)}
        users: tuple[tuple[str, str, tuple[str, ...]], ...] = (
            ("betas", "name", ("adamw", "lamb")),
            ("epsilon", "name", ("adamw", "lamb", "adafactor")),
            ("momentum", "name", ("sgd", "lars")),
            ("nesterov", "name", ("sgd",)),
            ("relative_step", "name", ("adafactor",)),
            ("decay_steps", "schedule", ("warmup_stable_decay",)),
            ("final_learning_rate_ratio", "schedule", ("linear", "cosine", "warmup_stable_decay")),
        )
        for setting, chooser, choices in users:
            if getattr(self, setting) != defaults[setting] and getattr(self, chooser) not in choices:
                has = f'{chooser} = "{getattr(self, chooser)}"'
                use = " or ".join(f'"{choice}"' for choice in choices)
                raise _RULES.refuse(self, setting, f"is not used with {has}. Remove it, or use {chooser} = {use}.")
        if self.nesterov and self.momentum == 0:
            raise _RULES.refuse(self, "nesterov", "needs momentum above 0, such as 0.9.")

    def _check_scaling(self) -> None:
        if self.batch_scaling != "none" and self.base_batch_size is None:
            problem = "needs base_batch_size: the global batch size that learning_rate was found for."
            raise _RULES.refuse(self, "batch_scaling", problem)
        if self.batch_scaling == "none" and self.base_batch_size is not None:
            problem = 'is not used with batch_scaling = "none". Use batch_scaling = "linear" or "square_root".'
            raise _RULES.refuse(self, "base_batch_size", problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRecipe:
    """`[run.profile]`: a run that profiles some of its steps by itself, once after each start.

    `weft profile` asks for further windows while it runs.  Steps of a window take longer.
    """

    ranks: Literal["none", "suspects", "all"] = "none"
    """`suspects`: when ranks are found that hold the run back, they and one healthy rank.  `all`: every rank, after its
    first steps."""
    steps: int = 3
    """Steps of the window."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        _RULES.between(self, 1, 100, "steps", below=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecipe:
    """How long to train, and what to do on the way."""

    steps: int
    """Optimizer steps."""
    seed: int = 1234
    """Seed of initial weights, data order and dropout."""
    evaluate_every: int | None = None
    """Steps between evaluations; by default none."""
    evaluate_batches: int | None = None
    """Global batches per evaluation; by default the whole validation set once."""
    save_every: int | None = None
    """Steps between saves; a run also saves at its end and when it is stopped."""
    checkpoints: str | None = None
    """Object store that saves last in, such as `s3://bucket/prefix`; below it each run has a folder of its name.  By
    default saves last in the run's folder.  Credentials are those of the machine."""
    log_every: int = 1
    """Steps between reports."""
    max_skipped_steps: int = 10
    """Consecutive non-finite steps after which the run stops with an error."""
    min_devices: int = 1
    """Fewest devices, one rank on each, that the run goes on with."""
    max_devices: int | None = None
    """Most devices that the run takes; by default all that its plan has a use for."""
    ledger: bool = False
    """Keep which samples were in each step, in `ledger/` of the run's folder; `weft data ledger` proves by it that each
    sample of an epoch was used once, whatever failed."""
    telemetry: bool = True
    """Record where the time of every step goes on every rank, in `telemetry.sqlite` of the run's folder."""
    profile: ProfileRecipe = field(default_factory=ProfileRecipe)
    """`[run.profile]`: steps that the run profiles by itself."""
    on_failure: OnFailure = field(default_factory=OnFailure)
    """`[run.on_failure]`: what the run does when something fails."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        _RULES.at_least(self, 1, "steps", "evaluate_every", "evaluate_batches", "save_every", "log_every")
        _RULES.at_least(self, 1, "min_devices", "max_devices")
        _RULES.at_least(self, 0, "max_skipped_steps", "seed")
        _RULES.between(self, 0, 2**63, "seed")
        if self.profile.ranks != "none" and not self.telemetry:
            raise _RULES.refuse(
                self, "telemetry", "records nothing, so [run.profile] would find no step. Leave one of them out."
            )
        if self.checkpoints is not None and not _STORE.fullmatch(self.checkpoints):
            problem = "is no URL of an object store. Write s3://bucket/prefix, or leave it out."
            if "@" not in self.checkpoints:
                raise _RULES.refuse(self, "checkpoints", problem)
            # What may be a password is not repeated.
            problem = "holds credentials: those belong to the machine. Write s3://bucket/prefix."
            raise problem_error(RecipeError, ("checkpoints",), "…@…", problem)
        if self.evaluate_batches is not None and self.evaluate_every is None:
            raise _RULES.refuse(self, "evaluate_batches", "is not used without evaluate_every. Give both, or neither.")
        if self.max_devices is not None and self.max_devices < self.min_devices:
            raise _RULES.refuse(self, "max_devices", f"is less than min_devices = {self.min_devices}. Raise it.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PermitRecipe:
    """Changes of the numerics that a plan may make; nothing else changes them."""

    precision: tuple[Precision, ...] = ("fp32",)
    """Precisions that a plan may compute in."""
    compression: tuple[str, ...] = ()
    """Lossy compressions of gradients that a plan may use."""
    staleness: int = 0
    """Steps by which the weights of a gradient may be out of date."""
    local_steps: int = 0
    """Most steps that replicas may take by themselves before they average what they learnt; 0: gradients are summed
    over all replicas in every step."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        _RULES.at_least(self, 0, "staleness", "local_steps")
        if not self.precision:
            raise _RULES.refuse(self, "precision", 'is empty. Write ["fp32"].')
        for index, name in enumerate(self.compression):
            if name not in COMPRESSIONS:
                hint = did_you_mean(name, COMPRESSIONS) or f" Known are {', '.join(COMPRESSIONS)}."
                raise _RULES.refuse(self, "compression", f"is not a compression.{hint}", index)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A training, without its devices. Equal recipes give equal loss curves, whatever the plan and the cluster."""

    model: ModelRecipe
    data: DataRecipe = field(default_factory=DataRecipe)
    batch: BatchRecipe
    optimizer: OptimizerRecipe = field(default_factory=OptimizerRecipe)
    run: RunRecipe
    permit: PermitRecipe = field(default_factory=PermitRecipe)
    origins: Mapping[str, str] = field(
        default_factory=dict[str, str], compare=False, repr=False, kw_only=True, metadata=HIDDEN
    )
    """Dotted key → where it was given: `recipe.toml, line 9`, or `--set`.  No setting: not compared, not written."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        steps = self.run.steps
        if self.optimizer.warmup_steps > steps:
            problem = f"is longer than run.steps = {steps}. Use {steps} or less."
            raise _RULES.refuse(self, "optimizer", problem, "warmup_steps")
        decay = self.optimizer.decay_steps
        if decay is not None and self.optimizer.warmup_steps + decay > steps:
            left = steps - self.optimizer.warmup_steps
            problem = f"and warmup_steps = {self.optimizer.warmup_steps} are together longer than run.steps = {steps}."
            use = f"Use {left} or less." if left else "Use fewer warmup_steps."
            raise _RULES.refuse(self, "optimizer", f"{problem} {use}", "decay_steps")

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits that name this recipe: the same for equal recipes, on every machine."""
        return hashlib.sha256(dump(self, everything=True, descriptions=False).encode()).hexdigest()[:12]

    @property
    def is_predictable(self) -> bool:
        """Whether the planner can price it without building the model: a factory's sizes are known only then."""
        return self.model.factory is None

    @property
    def is_runnable(self) -> bool:
        """Whether the engine can train it today.  Always: what a recipe permits, a plan need not use."""
        return True
