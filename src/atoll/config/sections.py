"""The sections of a config: every key, its type, its bounds and its default."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1, le=10**9)]
Natural = Annotated[int, Meta(ge=0, le=10**9)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
NonNegative = Annotated[float, Meta(ge=0.0, le=1e9)]
Above0 = Annotated[float, Meta(gt=0.0, le=1e9)]
Seconds = Annotated[float, Meta(gt=0.0, le=1e9)]
Below1 = Annotated[float, Meta(ge=0.0, lt=1.0)]
ALL: Literal["all"] = "all"
CUSTOM = "custom"
"""A model the syncer has no code of: the first learner to join brings its shapes and initial weights."""
IMAGE_MODELS = ("lenet5", "resnet18", "vlm")
"""Models that read pictures: the text's keys of [data] mean nothing to them."""
CODEC = r"^(fp32|bf16|int8|int4|int2|int1|e3m0|(top_k|random_drop):(0?\.\d*[1-9]\d*|1(\.0*)?))$"
CodecName = Annotated[str, Meta(pattern=CODEC, description="fp32 bf16 int8 int4 int2 int1 e3m0 top_k:SHARE random_drop:SHARE")]


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sections are values: equal means equal, and nothing can be changed after the border."""


class Protocol(_Section, frozen=True):
    """Who is merged with whom, when, and what travels."""

    local_steps_per_round: Annotated[int, Meta(ge=1, le=10**6)] = 24
    """H: completed inner optimiser steps between two synchronisations of the same fragment."""
    fragmentation: Literal["whole", "layer", "tensor", "balanced", "sub_tensor"] = "balanced"
    fragments: Annotated[int, Meta(ge=0, le=10**5)] = 24
    """P. 0 lets `layer` derive it from the number of blocks."""
    layers_per_fragment: Positive = 3
    layer_order: Literal["strided", "sequential"] = "strided"
    overlap: Natural = 2
    """tau: inner steps between the pull of a fragment and its adoption; rounds that may be in flight."""
    overlap_by_learner: tuple[Natural, ...] = ()
    """tau per learner, for exact adoption only; empty means `overlap` for all."""
    quorum: Positive | Literal["all"] = 1
    """K: the least number of learners whose reports count towards one outer step. "all": every member in sync."""
    grace: Literal["none", "adaptive"] = "adaptive"
    grace_gamma: Share = 0.8
    ema_weight: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.1
    pace: NonNegative = 1.0
    """Least time between outer steps, in median step times (so between two rounds of P <= H: pace * H*step/P)."""
    contribution: Literal["weights", "gradient"] = "weights"
    aggregation_weighting: Literal["uniform", "num_samples", "tokens"] = "tokens"
    merge: Literal["mean", "rda"] = "rda"
    embedding_merge: Literal["mean", "rda"] = "mean"
    merge_norm: Literal["tensor", "row", "fragment"] = "tensor"
    embedding_glob: str = ""
    alpha: Share = 0.0
    """Mixing on adoption: alpha * own + (1 - alpha) * Theta."""
    anchor: Literal["adopted", "present", "round_start"] = "present"
    adopt: Literal["exact", "arrival"] = "arrival"
    lead: Annotated[int, Meta(ge=-1)] = -1
    """Local steps a learner may run past its last due adoption. -1: tau where K = M, unlimited elsewhere."""
    codec_up: CodecName = "int4"
    codec_down: CodecName = "bf16"
    error_feedback: bool = False
    stochastic_rounding: bool = False
    freeze_not_due: bool = False
    """FedPart: freeze what is not due next. An ablation, known to be far worse."""
    ramp: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.0
    """Share of the outer steps over which the interval grows 1, 2, 4, ... up to H."""
    snapshot_interval: Natural = 0
    elastic: bool = True
    """False: a lost member still counts towards "all", so everybody waits for its return (plain data-parallel)."""


class Outer(_Section, frozen=True):
    outer_optimizer: Literal["sgd", "momentum", "nesterov", "delayed_nesterov", "inner"] = "nesterov"
    """`inner` runs the inner optimiser on Theta with the merged gradient: data-parallel training."""
    outer_learning_rate: Annotated[float, Meta(gt=0.0, le=1e3)] = 0.7
    outer_momentum: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.9
    delay: Positive = 1
    """N of delayed Nesterov."""
    apply_outer_optimizer_to: Literal["parameters", "all_floating"] = "parameters"


class Inner(_Section, frozen=True):
    optimizer: Literal["AdamW", "Adam", "SGD", "Muon"] = "AdamW"
    """Muon: hidden matrices by the orthogonal factor of their momentum, the rest by AdamW; learners then differ less."""
    learning_rate: Annotated[float, Meta(gt=0.0, le=1e3)] = 3e-3
    weight_decay: NonNegative = 0.01
    betas: tuple[Below1, Below1] = (0.9, 0.95)
    momentum: Share = 0.0
    """SGD's."""
    muon_momentum: Share = 0.95
    muon_except: str = "*head*"
    """Globs, separated by commas: matrices that Muon leaves to AdamW besides the embeddings."""
    clip_norm: NonNegative = 1.0
    """0 switches clipping off."""
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup_share: Share = 0.05
    final_share: Share = 0.1
    accumulate: Annotated[int, Meta(ge=1, le=10**5)] = 1
    """Micro-batches per optimiser step. H counts optimiser steps, never these."""
    preserve_optimizer_state: bool = True


class Model(_Section, frozen=True):
    name: str = "decoder"
    """`decoder`; `lenet5`, `resnet18`, `vlm` on pictures (docs/research/vision.md); `custom`: whatever the first learner brings
    (atoll.join); or package.module:function, which each learner and the syncer must allow by --allow-model."""
    numbers: dict[str, int | float | bool] = {}
    dtype: Literal["float32", "bfloat16"] = "float32"


class Data(_Section, frozen=True):
    corpus: str = "stdlib"
    """`stdlib`: the running interpreter's standard-library sources; or text: a file (plain, JSON lines, Parquet; .xz, .gz,
    .zst), a folder, a glob, or several separated by commas. See docs/research/data.md."""
    field: str = "text"
    """Of JSON lines and Parquet: where the text is."""
    heldout: str = ""
    """Text to evaluate on, named as in `corpus`; empty: every twentieth document of `corpus`, by its hash."""
    max_bytes: Annotated[int, Meta(ge=0, le=10**12)] = 0
    """Of text, unpacked. The standard library is cut there, files that hold more are refused. 0: 4 MB of the standard
    library, 20 GB of files."""
    tokenizer: str = "bytes"
    """`bytes`; `bpe`: trained on the corpus; or a Hugging Face tokenizer's JSON file (.xz, .gz, .zst)."""
    end_of_document: str = ""
    """The entry of a Hugging Face tokenizer that ends a document; empty: <|endoftext|>, </s> or the like."""
    cache: str = ""
    """Folder for encoded text; empty: atoll in $XDG_CACHE_HOME or ~/.cache; `off`: encode in every process."""
    vocab: Positive = 512
    """Entries of the trained BPE; byte-level has 257."""
    seq_len: Positive = 64
    batch_size: Annotated[int, Meta(ge=1, le=10**6)] = 8
    heldout_batches: Positive = 16
    heldout_every: Natural = 0
    """Outer steps between two looks at the held-out loss of Theta while it trains; 0: before and after only."""
    samples_by_learner: tuple[Positive, ...] = ()
    """Batch size per learner where they differ (empty: `batch_size` for all)."""
    augment: Literal["none", "crop", "crop_flip"] = "none"
    """Pictures only: moved by up to an eighth of their side, and mirrored."""


class Cluster(_Section, frozen=True):
    """Virtual hardware and network: what the simulator stands on."""

    step_seconds: Annotated[float, Meta(ge=1e-6, le=1e6)] = 1.0
    step_noise: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.05
    """Standard deviation of a step's duration, as a share of its mean."""
    step_distribution: Literal["normal", "lognormal"] = "normal"
    """`lognormal` has a long tail of slow steps."""
    slow_share: Share = 0.0
    slow_factor: Annotated[float, Meta(ge=1.0, le=1e6)] = 1.18
    latency_seconds: NonNegative = 0.02
    up_gbit: Annotated[float, Meta(ge=1e-6, le=1e9)] = 1.0
    down_gbit: Annotated[float, Meta(ge=1e-6, le=1e9)] = 1.0
    mtbf_seconds: NonNegative = 0.0
    """Mean time between failures of one learner, exponential; 0: none fail but by a chaos plan."""
    repair_seconds: Above0 = 20.0
    """Mean time until a failed learner is back, exponential."""
    detect_seconds: Above0 = 3.0
    """How long a dead connection takes to be noticed."""
    parameters: Annotated[int, Meta(ge=1, le=10**14)] = 1_000_000
    """Model size where no tensor says it (atoll sim)."""


class Limits(_Section, frozen=True):
    """Everything has a limit, and the limits are tests."""

    versions_max: Annotated[int, Meta(ge=2)] = 8
    """Announced versions of one fragment that the syncer keeps for laggards."""
    silence_steps: Above0 = 8.0
    """A member unheard of for so many of its own steps is silent."""
    patience_seconds: NonNegative = 0.5
    """No deadline derived from measured times is shorter: a busy machine may stall for as long, and nobody is gone."""
    start_wait_seconds: Above0 = 60.0
    """How long the first round waits for the declared number of learners."""
    first_pull_seconds: Above0 = 60.0
    """Deadline of a pull before any was measured."""
    recovery_intervals: Above0 = 8.0
    """Patience with a peer's state transfer, in intervals of H rounds."""
    suspicions_max: Positive = 3
    """Updates in a row with a norm far beyond the usual that send a learner into recovery; each of them is refused."""
    outlier_factor: Annotated[float, Meta(gt=1.0, le=1e9)] = 100.0
    """A contribution whose norm exceeds the running median of its fragment by this factor is refused."""
    tokens_per_step_max: Annotated[int, Meta(ge=0, le=10**12)] = 0
    """0: as the data section says."""
    leave_seconds: Above0 = 20.0
    """How long a learner that was asked to stop goes on, to deliver the fragments due soonest."""
    snapshots_kept: Positive = 3
    """Newest snapshots that stay on disk."""
    serves_max: Positive = 4
    """Peers' recoveries one learner serves at a time."""
    members_max: Annotated[int, Meta(ge=1, le=4096)] = 1024
    """Every message carries a clock with an entry a member: cost grows with the square of their number."""


class Config(_Section, frozen=True):
    preset: str = "decoupled"
    seed: Natural = 0
    learners: Positive = 4
    total_steps: Positive = 240
    """T: the length of the run in steps. One step of the run is one inner step of every learner that keeps pace, and one outer
    step of the syncer; a preset with `local_steps_per_round` = H merges a fragment every H of them."""
    protocol: Protocol = Protocol()
    outer: Outer = Outer()
    inner: Inner = Inner()
    model: Model = Model()
    data: Data = Data()
    cluster: Cluster = Cluster()
    limits: Limits = Limits()
