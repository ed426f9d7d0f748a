"""The sections of a config: every key, its type, its bounds and its default."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1, le=10**9)]
Natural = Annotated[int, Meta(ge=0, le=10**9)]
From0To1 = Annotated[float, Meta(ge=0.0, le=1.0)]
NonNegative = Annotated[float, Meta(ge=0.0, le=1e9)]
Above0 = Annotated[float, Meta(gt=0.0, le=1e9)]
Seconds = Annotated[float, Meta(gt=0.0, le=1e9)]
Below1 = Annotated[float, Meta(ge=0.0, lt=1.0)]
Stages = tuple[tuple[From0To1, Annotated[float, Meta(ge=0.0, le=10.0)]], ...]
ALL: Literal["all"] = "all"
CUSTOM = "custom"
"""A model whose code the syncer does not have: the first learner to join uploads its shapes and initial weights."""
IMAGE_MODELS = ("lenet5", "resnet18", "vlm")
"""Models that read images: the keys of [data] for text do not apply to them."""
CodecName = Annotated[str, Meta(description="a codec of config/codecs.py, or one that was registered")]
MergeName = Annotated[str, Meta(description="a merge of config/merges.py, or one that was registered")]


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sections are values: compared by content, and unchangeable once checked."""


class Protocol(_Section, frozen=True):
    """Which learners are merged, when, and what is sent."""

    local_steps_per_round: Annotated[int, Meta(ge=1, le=10**6)] = 24
    """H: completed inner optimiser steps between two synchronisations of the same fragment."""
    fragmentation: Literal["whole", "layer", "tensor", "balanced", "sub_tensor"] = "balanced"
    """How the model is divided into fragments. `whole`: one fragment. `layer`: groups of blocks, and one fragment for all other
    tensors. `tensor`: tensor i goes to fragment i mod P. `balanced`: tensors by size, each into the smallest fragment so far.
    `sub_tensor`: as `balanced`, with large tensors cut along their first axis."""
    fragments: Annotated[int, Meta(ge=0, le=10**5)] = 24
    """P, the number of fragments. 0: `layer` derives it from the number of blocks."""
    layers_per_fragment: Positive = 3
    """Blocks per fragment; used only if `fragments` is 0."""
    layer_order: Literal["strided", "sequential"] = "strided"
    """Which blocks `layer` groups. `strided`: every g-th block. `sequential`: neighbours."""
    overlap: Natural = 2
    """tau: inner steps between the pull of a fragment and its adoption, and the most rounds in flight."""
    overlap_by_learner: tuple[Natural, ...] = ()
    """tau per learner, for exact adoption only; empty: `overlap` for all."""
    quorum: Positive | Literal["all"] = 1
    """K: the least number of learners whose reports count towards one outer step. "all": every member in sync."""
    grace: Literal["none", "adaptive"] = "adaptive"
    """`adaptive`: a round with a quorum waits for more learners while the overlap hides the wait. `none`: it does not wait."""
    grace_gamma: From0To1 = 0.8
    """Share of the slack that the adaptive grace window may use."""
    ema_weight: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.1
    """Weight of the newest value in the moving averages of step, pull, round and sync times."""
    pace: NonNegative = 1.0
    """Least time between outer steps, in median step times (so between two rounds of P <= H: pace * H*step/P)."""
    dynamic_steps: bool = False
    """Dynamic local updates: the syncer pulls from each learner when that has trained its own number of steps on the version that
    it was sent last: H for the fastest, fewer for slower ones in proportion. Only those who took part are sent the result."""
    contribution: Literal["weights", "gradient"] = "weights"
    """What a learner sends: the change of its `weights` since the anchor, or a `gradient` (`ddp` alone)."""
    aggregation_weighting: Literal["uniform", "num_samples", "tokens"] = "tokens"
    """Weight of a learner in a merge. `uniform`: equal. `num_samples`: its samples since it last adopted the fragment. `tokens`:
    its tokens since then, times its tokens per step."""
    merge: MergeName = "rda"
    """How the learners' outer gradients become one: their weighted `mean`, or radial-directional averaging (`rda`)."""
    embedding_merge: MergeName = "mean"
    """The same for embeddings."""
    merge_norm: Literal["tensor", "row", "fragment"] = "tensor"
    """What RDA treats as one vector: each tensor, each row of a tensor, or the whole fragment."""
    embedding_glob: str = ""
    """Glob of parameter names that count as embeddings; empty: weights of `nn.Embedding` and tensors tied to them."""
    alpha: From0To1 = 0.0
    """Mixing on adoption: alpha * own + (1 - alpha) * Theta."""
    keep_overlap: bool = False
    """What a learner trained on a fragment between its pull and the adoption of the result is added to the adopted version, and
    is part of its next contribution. Otherwise the adoption replaces it, and it is lost. It costs a learner the memory of one
    more copy of each fragment that is staged or in flight."""
    anchor: Literal["adopted", "present", "round_start"] = "present"
    """The base of the outer gradient: the version that the learner last `adopted`, the syncer's `present` Theta, or the learner's
    own weights at the `round_start` (the one-round delay of `async_diloco`)."""
    eager: bool = False
    """With anchor `round_start`: a learner applies its own share of its newest outer gradient at once, on top of the version that
    it adopts, and not only when it comes back in an announced version."""
    adopt: Literal["exact", "arrival"] = "arrival"
    """When a learner adopts a new version. `exact`: tau inner steps after the pull; it waits if necessary. `arrival`: at the
    first step boundary after the version arrives; it never waits."""
    lead: Annotated[int, Meta(ge=-1)] = -1
    """Local steps that a learner may take past its last due adoption. 0: none, a barrier at every step in which a fragment is
    due. -1: tau if `quorum` is "all", else unlimited."""
    codec_up: CodecName = "int4"
    """Codec of contributions, learner to syncer."""
    codec_down: CodecName = "bf16"
    """Codec of announced versions, syncer to learner. A lossy codec sends the difference to the previous announcement."""
    error_feedback: bool = False
    """A learner adds what `codec_up` rounded away to its next contribution of the same fragment."""
    feedback_decay: From0To1 = 1.0
    """What `error_feedback` adds is multiplied by this first. Below 1 old errors fade, and the sum is like a momentum."""
    stochastic_rounding: bool = False
    """`codec_up` rounds up or down at random, without bias, instead of to the nearest value."""
    freeze_not_due: bool = False
    """FedPart: freezes the fragments that are not due next. An ablation, known to be far worse."""
    ramp: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.0
    """Share of the outer steps over which the interval grows 1, 2, 4, ... up to H."""
    snapshot_interval: Natural = 0
    """Outer steps between two snapshots; 0: none."""
    rollback_interval: Natural = 100
    """Outer steps between two points that `atoll rollback` can return to; 0: none."""
    elastic: bool = True
    """False: a lost member still counts towards "all", so the others wait for its return (plain data-parallel)."""


class Outer(_Section, frozen=True):
    """The outer optimiser, which the syncer runs on Theta."""

    outer_optimizer: Literal["sgd", "momentum", "nesterov", "delayed_nesterov", "inner"] = "nesterov"
    """`inner` runs the inner optimiser on Theta with the merged gradient: data-parallel training."""
    outer_learning_rate: Annotated[float, Meta(gt=0.0, le=1e3)] = 0.7
    """Rate of the outer optimiser."""
    outer_momentum: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.9
    """Momentum of the outer optimiser; `sgd` and `inner` do not use it."""
    delay: Natural = 1
    """N of delayed Nesterov: outer steps per update of the momentum; with `dynamic_steps`, contributions per update. 0: as many
    as `learners`."""
    momentum_warmup: Below1 = 0.0
    """Share of the run over which the momentum is gathered and not yet applied: Theta takes merged outer gradients at rate 1."""
    momentum_schedule: Stages = ()
    """Pairs of (share of the run, momentum): from that share on this is the momentum. Before the first pair: `outer_momentum`."""
    rate_schedule: Stages = ()
    """The same for `outer_learning_rate`, as factors of it."""
    average_decay: Below1 = 0.0
    """An average of Theta over time, for evaluation only: at each of its outer steps a fragment's average keeps this share and
    takes the rest from Theta. 0: none. See `loss_average`, theta_average.safetensors."""
    apply_outer_optimizer_to: Literal["parameters", "all_floating"] = "parameters"
    """`parameters`: buffers are averaged without momentum. `all_floating`: floating buffers are stepped too, with a warning."""


class Inner(_Section, frozen=True):
    """The optimiser that each learner runs on its own weights."""

    optimizer: Literal["AdamW", "Adam", "SGD", "Muon"] = "AdamW"
    """`Muon`: hidden matrices step by the orthogonal factor of their momentum, the rest by AdamW; learners then differ less."""
    learning_rate: Annotated[float, Meta(gt=0.0, le=1e3)] = 3e-3
    """Rate of the inner optimiser after the warm-up, before the schedule lowers it."""
    weight_decay: NonNegative = 0.01
    """Decoupled weight decay of AdamW and Muon; L2 penalty of Adam and SGD."""
    betas: tuple[Below1, Below1] = (0.9, 0.95)
    """Decay rates of AdamW's and Adam's two moments."""
    momentum: From0To1 = 0.0
    """Momentum of SGD."""
    muon_momentum: From0To1 = 0.95
    """Momentum of the matrices that Muon steps."""
    muon_except: str = "*head*"
    """Globs, separated by commas: matrices that Muon leaves to AdamW besides the embeddings."""
    adam_rate: Annotated[float, Meta(gt=0.0, le=1e3)] = 1.0
    """With Muon, the rate of what it leaves to AdamW, as a multiple of `learning_rate`."""
    clip_norm: NonNegative = 1.0
    """Norm at which gradients are clipped; 0: no clipping."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """How the rate falls after the warm-up: `cosine` down to `final_share`, or `constant`."""
    warmup_share: From0To1 = 0.05
    """Share of the run over which the rate rises from near 0."""
    final_share: From0To1 = 0.1
    """Rate at the end of the cosine, as a share of `learning_rate`."""
    accumulate: Annotated[int, Meta(ge=1, le=10**5)] = 1
    """Micro-batches per optimiser step. H counts optimiser steps, never these."""
    preserve_optimizer_state: bool = True
    """False: adopting a fragment resets its inner optimiser state. Not faithful to DiLoCo, and gives a warning."""


class Model(_Section, frozen=True):
    """The model."""

    name: str = "decoder"
    """`decoder`; `lenet5`, `resnet18`, `vlm` on images (docs/research/vision.md); `custom`: the model of the first learner
    (atoll.join); or package.module:function, which each learner and the syncer must allow by --allow-model."""
    size: str = ""
    """A decoder's width, layers, heads and so on by one name, such as "35M" (docs/research/models.md lists them). Numbers given
    beside it or in a later layer override those of the size. A resolved config has the numbers and an empty size."""
    numbers: dict[str, int | float | bool] = {}
    """The model's own numbers, such as `width`, `layers` and `heads`: see docs/research/models.md."""
    precision: Literal["auto", "fp32", "tf32", "bf16"] = "auto"
    """Arithmetic of the forward and backward pass; weights and moments are fp32 always. `auto`, resolved by each learner for
    itself: `bf16` (autocast) on CUDA, `fp32` on a CPU."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Whether torch.compile builds the step. `auto`: on CUDA. A model that cannot be compiled needs `off`."""
    deterministic: bool = False
    """On a GPU: only operations of torch that give the same bits each time, so that `atoll replay --weights --device cuda` can
    demand every Theta bit for bit. Slower. A CPU is deterministic anyway."""
    checkpoint_activations: bool = False
    """A decoder keeps the inputs of its layers only and computes the rest again in the backward pass: less memory, slower."""
    init: str = ""
    """The weights that a run begins with: `dcp:FOLDER`, a checkpoint of torch.distributed.checkpoint, or a .safetensors file, as
    another run's theta.safetensors. Empty: drawn from the seed. Only the syncer reads it, and a resumed run does not."""


class Data(_Section, frozen=True):
    """The data for training and evaluation."""

    corpus: str = "stdlib"
    """`stdlib`: the running interpreter's standard-library sources; or text: a file (plain, JSON lines, Parquet; .xz, .gz,
    .zst), a folder, a glob, or several separated by commas. See docs/research/data.md."""
    field: str = "text"
    """The field of JSON lines and Parquet that has the text."""
    heldout: str = ""
    """Text to evaluate on, named as in `corpus`; empty: every twentieth document of `corpus`, by its hash."""
    max_bytes: Annotated[int, Meta(ge=0, le=10**12)] = 0
    """Limit on the text, uncompressed. The standard library is cut there; files with more are refused. 0: 4 MB of the standard
    library, 20 GB of files."""
    tokenizer: str = "bytes"
    """`bytes`; `bpe`: trained on the corpus; or a Hugging Face tokenizer's JSON file (.xz, .gz, .zst)."""
    end_of_document: str = ""
    """The token of a Hugging Face tokenizer that ends a document; empty: <|endoftext|>, </s> or a similar one."""
    cache: str = ""
    """Folder for encoded text; empty: atoll in $XDG_CACHE_HOME or ~/.cache; `off`: encode in every process."""
    vocab: Positive = 512
    """Tokens of the trained BPE; `bytes` has 257."""
    seq_len: Positive = 64
    """Tokens per sample."""
    batch_size: Annotated[int, Meta(ge=1, le=10**6)] = 8
    """Samples per micro-batch of a learner."""
    heldout_batches: Positive = 16
    """Batches of `batch_size` that the held-out loss is measured on."""
    heldout_every: Natural = 0
    """Outer steps between two held-out points of Theta during training; 0: before and after only."""
    samples_by_learner: tuple[Positive, ...] = ()
    """Batch size per learner, if they differ; empty: `batch_size` for all."""
    augment: Literal["none", "crop", "crop_flip"] = "none"
    """Images only. `crop`: shifted by up to an eighth of their side. `crop_flip`: mirrored at random as well."""


class Cluster(_Section, frozen=True):
    """Virtual hardware and network, for `--virtual` and `atoll sim`."""

    step_seconds: Annotated[float, Meta(ge=1e-6, le=1e6)] = 1.0
    """Mean duration of an inner step of a learner that is not slow."""
    step_noise: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.05
    """Standard deviation of a step's duration, as a share of its mean."""
    step_distribution: Literal["normal", "lognormal"] = "normal"
    """`lognormal` has a long tail of slow steps."""
    slow_share: From0To1 = 0.0
    """Share of the learners that are slow."""
    slow_factor: Annotated[float, Meta(ge=1.0, le=1e6)] = 1.18
    """Step time of a slow learner, as a multiple of the others'."""
    latency_seconds: NonNegative = 0.02
    """One way between a learner and the syncer."""
    up_gbit: Annotated[float, Meta(ge=1e-6, le=1e9)] = 1.0
    """Bandwidth of a learner's link to the syncer, in Gbit/s."""
    down_gbit: Annotated[float, Meta(ge=1e-6, le=1e9)] = 1.0
    """Bandwidth of the syncer's link to a learner, in Gbit/s."""
    mtbf_seconds: NonNegative = 0.0
    """Mean time between failures of one learner, exponential; 0: failures come from a chaos plan only."""
    repair_seconds: Above0 = 20.0
    """Mean time until a failed learner is back, exponential."""
    detect_seconds: Above0 = 3.0
    """Time until a dead connection is noticed."""
    parameters: Annotated[int, Meta(ge=1, le=10**14)] = 1_000_000
    """Size of the model in runs without tensors (atoll sim)."""
    chips: Annotated[int, Meta(ge=0, le=10**8)] = 0
    """Chips of all learners together, which fail one by one and take their slices with them (docs/planning/simulators.md). A
    failed slice is back after `repair_seconds`. 0: learners fail as a whole, by `mtbf_seconds`."""
    mtbi_hours: Above0 = 8760.0
    """Mean time between interruptions of one chip; for `chips`."""
    slice_chips: Positive = 128
    """Chips that one failure takes out; for `chips`."""
    resize_seconds: NonNegative = 12.0
    """Pause of a learner when slices leave or return; for `chips`."""


class Limits(_Section, frozen=True):
    """Bounds on time, memory and trust: nothing in a run is unlimited."""

    versions_max: Annotated[int, Meta(ge=2)] = 8
    """Announced versions of one fragment that the syncer keeps for slow learners."""
    silence_steps: Above0 = 8.0
    """A member that sends nothing for this many of its own steps is silent."""
    patience_seconds: NonNegative = 0.5
    """Lower limit of every deadline derived from measured times: a busy machine may stall this long without being lost."""
    start_wait_seconds: Above0 = 60.0
    """How long the first round waits for the declared number of learners."""
    first_pull_seconds: Above0 = 60.0
    """Deadline of a pull while no pull time is measured yet."""
    recovery_intervals: Above0 = 8.0
    """Deadline of a peer's state transfer, in intervals of H rounds."""
    suspicions_max: Positive = 3
    """After this many outliers in a row a learner must recover; each of them is refused. See `outlier_factor`."""
    outlier_factor: Annotated[float, Meta(gt=1.0, le=1e9)] = 100.0
    """A contribution whose norm exceeds the running median of its fragment by this factor is refused."""
    peer_factor: Annotated[float, Meta(gt=1.0, le=1e9)] = 10.0
    """A contribution whose norm exceeds the median of the other contributions of its round by this factor is refused."""
    share_max: Annotated[float, Meta(ge=0.5, le=1.0)] = 0.5
    """The largest share that one learner has in a merge of four or more. 1 is without a limit."""
    offences_max: Positive = 20
    """A learner that breaks the rules this often is expelled. Each contribution that is accepted pays one off."""
    tokens_per_step_max: Annotated[int, Meta(ge=0, le=10**12)] = 0
    """The most tokens that an inner step may report; 0: as follows from [data]."""
    leave_seconds: Above0 = 20.0
    """How long a learner that was asked to stop trains on, to deliver the fragments due next, unless it is told otherwise."""
    return_seconds: NonNegative = 3600.0
    """How long the place of a learner that was preempted is kept for its return. Meanwhile newcomers get other places; only one
    that asks for its id gets it."""
    snapshots_kept: Positive = 3
    """Snapshots kept on disk, newest first."""
    rollback_points: Positive = 2
    """Points to roll back to, newest first. Each costs the syncer's disk one copy of Theta and of the outer optimiser's state."""
    serves_max: Positive = 4
    """Recoveries that one learner serves at a time."""
    upload_bytes_max: Annotated[int, Meta(ge=1 << 10, le=1 << 44)] = 1 << 36
    """The largest custom model that a learner may upload to the syncer, in bytes: four for each parameter."""
    learners_per_certificate: Annotated[int, Meta(ge=1, le=4096)] = 1
    """Places that one certificate may take. A place belongs to the certificate that first took it."""
    places_per_token: Annotated[int, Meta(ge=0, le=4096)] = 0
    """Places that learners with the same join token may take; 0: four times `learners`, at least 16."""
    tape_segment_bytes: Annotated[int, Meta(ge=1 << 12, le=1 << 40)] = 1 << 24
    """A worker's tape goes on in a new segment after this many bytes. A restarted syncer reads the newest one."""
    tape_bytes_max: Annotated[int, Meta(ge=0, le=1 << 50)] = 1 << 32
    """Bytes of older segments, compressed, that each worker keeps for replay; the oldest are dropped."""
    members_max: Annotated[int, Meta(ge=1, le=4096)] = 1024
    """The most members."""


class Config(_Section, frozen=True):
    """A whole run: the keys without a section, then the sections."""

    preset: str = "decoupled"
    """The algorithm. A preset gives every key a value; recipe and `--set` change single keys."""
    seed: Natural = 0
    """Seed of initial weights, data order and virtual hardware."""
    learners: Positive = 4
    """M: how many learners the run is planned for. More may join, up to `limits.members_max`."""
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
