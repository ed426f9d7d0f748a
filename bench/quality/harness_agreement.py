"""`atoll eval` compared with lm-evaluation-harness: the same model and local benchmark files, both figures in one table.

    python bench/quality/harness_agreement.py --run runs/books --tasks-dir benchmarks --limit 200
    python bench/quality/harness_agreement.py --tasks-dir benchmarks    # without a run a small model is trained first
    python bench/quality/harness_agreement.py --show bench/quality/results/agreement.jsonl    # the table of lines kept by --out

`--tasks-dir` holds the JSON lines that `atoll eval --data` takes. The harness uses its own prompts: the task files written here
include those that it ships, and only the rows come from Atoll's files, under the column names of the published data sets. So a
difference in a prompt shows. It needs `pip install 'atoll[extras,eval]'`; nothing is downloaded.

Standard output ends with one JSON object, which `--out` appends to a file: the keys of the run's `atoll train --json`, the
differences from its preset's settings, the versions of both packages and every pair of figures. The exit status is 1 if the two
disagree. (This file cannot be called lm_eval.py: `import lm_eval` would find it, because a script's own folder comes first.)
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, TypeAlias

from experts_and_images import Line, differences, markdown, read

from atoll.chaos import ChaosPlan
from atoll.cli.runs import run_virtually
from atoll.config import load
from atoll.errors import UserError
from atoll.executor.environment import use_threads
from atoll.tasks.trained import Trained, check_tasks, evaluate_run, export_hf, open_trained
from atoll.workload.evaluation.benchmarks import Result, find_file, read_items
from atoll.workload.evaluation.likelihood import Query, encode

Record: TypeAlias = Mapping[str, Any]
METRICS: Final = ("acc", "acc_norm", "acc_bytes", "perplexity")
QUESTIONS: Final = "questions"
"""Shown beside the metrics: the number of prompts, and how many of them are equal in the harness, to the last blank."""
PERPLEXITY_SHARE: Final = 1e-3
"""Two programs sum the same logarithms in another order and in other batches: six digits agree, three are required."""
FILES: Final = ("data.corpus", "data.heldout", "data.tokenizer")
OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


# ---------------------------------------------------------------- Atoll's rows under the harness's names


def _piqa(r: Record) -> Record:
    return {"goal": r["ctx"], "sol1": r["choices"][0], "sol2": r["choices"][1], "label": r["gold"]}


def _lettered(r: Record) -> Record:
    letters = [chr(ord("A") + index) for index in range(len(r["choices"]))]
    return {"choices": {"text": r["choices"], "label": letters}, "answerKey": letters[r["gold"]]}


def _arc(r: Record) -> Record:
    return {"question": r["ctx"], **_lettered(r)}


def _openbookqa(r: Record) -> Record:
    return {"question_stem": r["ctx"], **_lettered(r)}


def _copa(r: Record) -> Record:
    first, second = r["choices"]
    return {"premise": r["ctx"], "question": r["question"], "choice1": first, "choice2": second, "label": r["gold"]}


def _lambada(r: Record) -> Record:
    return {"text": f"{r['ctx']} {r['target']}"}


def _hellaswag(r: Record) -> Record:
    return {
        "activity_label": r["label"], "ctx_a": r["ctx_a"], "ctx_b": r["ctx_b"], "endings": r["choices"], "label": str(r["gold"]),
    }  # fmt: skip


def _winogrande(r: Record) -> Record:
    return {"sentence": r["ctx"], "option1": r["choices"][0], "option2": r["choices"][1], "answer": str(r["gold"] + 1)}


def _siqa(r: Record) -> Record:
    answers = {f"answer{letter}": choice for letter, choice in zip("ABC", r["choices"], strict=True)}
    return {"context": r["passage"], "question": r["ctx"], **answers, "label": str(r["gold"] + 1)}


def _boolq(r: Record) -> Record:
    return {"passage": r["passage"], "question": r["ctx"], "label": r["gold"]}


@dataclass(frozen=True)
class Theirs:
    """A task as the harness ships it."""

    file: str
    """Below its folder of tasks."""
    row: Callable[[Record], Record]
    delimiter: str = " "
    """Between question and choice."""
    metrics: tuple[str, ...] = METRICS[:3]


TASKS: Final[dict[str, Theirs]] = {
    "piqa": Theirs("piqa/piqa.yaml", _piqa),
    "arc_easy": Theirs("arc/arc_easy.yaml", _arc),
    "arc_challenge": Theirs("arc/arc_challenge.yaml", _arc),
    # Its choices begin with a blank. With the shipped delimiter there would be two before each choice, and the blank would count
    # as a character of the choice in normalised scores.
    "copa": Theirs("super_glue/copa/default.yaml", _copa, delimiter="", metrics=("acc",)),
    "lambada": Theirs("lambada/lambada_openai.yaml", _lambada, metrics=("acc", "perplexity")),
    "hellaswag": Theirs("hellaswag/hellaswag.yaml", _hellaswag),
    "winogrande": Theirs("winogrande/default.yaml", _winogrande),
    "openbookqa": Theirs("openbookqa/openbookqa.yaml", _openbookqa),
    "siqa": Theirs("siqa/siqa.yaml", _siqa),
    "boolq": Theirs("super_glue/boolq/default.yaml", _boolq),
}
"""All of Atoll's but CommonsenseQA, whose prompt differs on purpose, and LAMBADA with its newlines."""


def write_task(task: str, shipped: Path, data: Path, folder: Path) -> None:
    """The rows, and a task file that equals the harness's except for the place of the rows. (YAML accepts JSON.)"""
    rows = folder / f"{task}.jsonl"
    with find_file(task, data).open(encoding="utf8") as ours, rows.open("w", encoding="utf8") as theirs:
        theirs.writelines(json.dumps(TASKS[task].row(json.loads(line))) + "\n" for line in ours)
    settings: dict[str, object] = {
        "include": str(shipped / TASKS[task].file), "task": f"atoll_{task}", "tag": [],
        "dataset_path": "json", "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": str(rows)}, "cache_dir": str(folder / "cache")},
        "training_split": None, "validation_split": None, "test_split": "test", "target_delimiter": TASKS[task].delimiter,
        "metric_list": [{"metric": metric} for metric in TASKS[task].metrics],  # some ship one metric, Atoll has three
    }  # fmt: skip
    (folder / f"{task}.yaml").write_text(json.dumps(settings), encoding="utf8")


# ---------------------------------------------------------------- both programs


@contextmanager
def offline() -> Iterator[None]:
    """Must also enclose the first import of datasets and transformers, which read these variables once."""
    before = {name: os.environ.get(name) for name in OFFLINE}
    os.environ.update(OFFLINE)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@dataclass(frozen=True)
class Answers:
    """Results of lm-evaluation-harness for one task."""

    figures: Mapping[str, float]
    queries: Sequence[Query]


def ask_harness(model: Path, tasks: Sequence[str], data: Path, folder: Path) -> dict[str, Answers]:
    """`model` is the folder of an exported model, `folder` an empty work folder."""
    import lm_eval.tasks
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    for task in tasks:
        write_task(task, Path(lm_eval.tasks.__file__).parent, data, folder)
    manager = lm_eval.tasks.TaskManager(include_path=str(folder), include_defaults=False)
    scores: dict[str, Any] | None = simple_evaluate(
        model=HFLM(pretrained=str(model), device="cpu", dtype="float32", batch_size=8),
        tasks=[f"atoll_{task}" for task in tasks], task_manager=manager, bootstrap_iters=0,
    )  # fmt: skip
    assert scores is not None  # None is for the other ranks of a distributed evaluation
    return {task: _answers(scores["results"][f"atoll_{task}"], scores["samples"][f"atoll_{task}"]) for task in tasks}


def _answers(results: Mapping[str, float], samples: Sequence[Mapping[str, Any]]) -> Answers:
    in_order = sorted(samples, key=lambda sample: sample["doc_id"])
    queries = [Query(*arguments[:2]) for sample in in_order for arguments in sample["arguments"]]
    return Answers({metric: results[f"{metric},none"] for metric in METRICS if f"{metric},none" in results}, queries)


@dataclass(frozen=True)
class Pair:
    task: str
    examples: int
    metric: str
    ours: float
    theirs: float
    too_long: int
    """Examples left out of both."""

    @property
    def agree(self) -> bool:
        """An accuracy may differ by one example: rounding decides between two equally likely choices."""
        room = {QUESTIONS: 0.0, "perplexity": PERPLEXITY_SHARE * self.theirs}.get(self.metric, 1.01 / self.examples)
        return abs(self.ours - self.theirs) <= room


def _scored(query: Query) -> tuple[str, str]:
    """The given and the scored text: both programs move blanks at the end of a context to the continuation."""
    given = query.context.rstrip()
    return given, query.context[len(given) :] + query.continuation


def keep_short(trained: Trained, task: str, data: Path, limit: int | None, folder: Path) -> int:
    """Copies the examples that both programs can score, and counts those left out: of a choice longer than the model's context
    Atoll drops the beginning, and the harness refuses it."""
    path = find_file(task, data)
    items = read_items(task, path, limit)
    lines = path.read_bytes().splitlines()[:limit]
    lengths = [max(len(encode(query, trained.tokenizer)[1]) for query in item.queries) for item in items]
    kept = [line for line, length in zip(lines, lengths, strict=True) if length <= trained.longest]
    (folder / f"{task}.jsonl").write_bytes(b"".join(line + b"\n" for line in kept))
    return len(lines) - len(kept)


def agreement(trained: Trained, tasks: Sequence[str], data: Path, limit: int | None = None) -> list[Pair]:
    """Every figure that both programs give."""
    with offline(), tempfile.TemporaryDirectory(prefix="atoll-harness-") as name:
        model, short, work = (Path(name) / each for each in ("model", "short", "work"))
        short.mkdir()
        work.mkdir()
        too_long = {task: keep_short(trained, task, data, limit, short) for task in tasks}
        export_hf(trained, model)
        theirs = ask_harness(model, tasks, short, work)
        ours = evaluate_run(trained, check_tasks(tasks, short, None))
        return [pair for each in ours for pair in _pairs(each, theirs[each.task], short, too_long[each.task])]


def _pairs(ours: Result, theirs: Answers, short: Path, too_long: int) -> Iterator[Pair]:
    queries = [query for item in read_items(ours.task, find_file(ours.task, short)) for query in item.queries]
    same = sum(_scored(own) == _scored(other) for own, other in zip(queries, theirs.queries, strict=True))
    yield Pair(ours.task, ours.examples, QUESTIONS, len(queries), same, too_long)
    for metric, figure in theirs.figures.items():
        own = getattr(ours, metric)
        if own is not None:
            yield Pair(ours.task, ours.examples, metric, own, figure, too_long)


def train_small(directory: Path, threads: int) -> Trained:
    """Trained enough that its answers do not depend on its initial weights, on text that every machine has."""
    config = load(preset_name="decoupled", overrides={
        "learners": 2, "total_steps": 200, "model": {"numbers": {"width": 64, "layers": 4, "heads": 4, "mlp": 128, "tied": True}},
        "data": {"tokenizer": "bpe", "vocab": 1024, "seq_len": 256, "batch_size": 2, "heldout_batches": 4},
        "inner": {"learning_rate": 0.006}, "outer": {"outer_momentum": 0.5},
    })  # fmt: skip
    run_virtually(config, ChaosPlan(), directory, tensors=True, threads=threads, quiet=True)
    return open_trained(directory)


# ---------------------------------------------------------------- output


def line_of(trained: Trained, found: Sequence[Pair], limit: int | None) -> Line:
    """The run's own summary and the figures of both programs; files without the folders of this machine."""
    path = trained.run / "summary.json"  # a syncer started alone writes none
    summary: Line = json.loads(path.read_text(encoding="utf8")) if path.is_file() else {}
    differs = differences(trained.config)
    for key in FILES:
        if key in differs:
            differs[key] = ",".join(Path(name).name for name in differs[key].split(","))
    more = {
        "name": "agreement", "differs": differs, "parameters": sum(p.numel() for p in trained.model.parameters()), "limit": limit,
        "lm_eval": version("lm_eval"), "transformers": version("transformers"), "agree": all(pair.agree for pair in found),
        "results": [asdict(pair) | {"agree": pair.agree} for pair in found],
    }  # fmt: skip
    return more | summary | {"tape": None, "run_dir": None}


def table(lines: Sequence[Line]) -> str:
    """A row per task; a cell has Atoll's figure and the harness's, for prompts their number and how many are equal."""
    shown = (QUESTIONS, *METRICS)
    rows = []
    for line in lines:
        pairs = [Pair(**{key: value for key, value in each.items() if key != "agree"}) for each in line["results"]]
        for task in dict.fromkeys(pair.task for pair in pairs):
            own = {pair.metric: pair for pair in pairs if pair.task == task}
            rows.append([
                f"`{task}`", f"{own[QUESTIONS].examples:,}", f"{own[QUESTIONS].too_long:,}",
                *(cell(own[metric]) if metric in own else "" for metric in shown),
            ])  # fmt: skip
    return markdown(["task", "examples", "too long", "questions, worded alike", *METRICS], rows)


def cell(pair: Pair) -> str:
    digits = {QUESTIONS: 0, "perplexity": 1}.get(pair.metric, 3)
    return f"{pair.ours:,.{digits}f} / {pair.theirs:,.{digits}f}"


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="folder of a run of `atoll train`; without it a small model is trained")
    parser.add_argument("--tasks-dir", type=Path, help="folder with the benchmarks' JSON lines")
    parser.add_argument("--tasks", default="piqa,arc_easy,copa,lambada", help=f"of {','.join(TASKS)}")
    parser.add_argument("--limit", type=int, default=None, help="only the first examples of each, this many")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="append the JSON object here")
    parser.add_argument("--show", type=Path, help="evaluate nothing, print the table of the lines in this file")
    return parser


def main() -> None:
    parser = options()
    chosen = parser.parse_args()
    if chosen.show:
        print(table(read(chosen.show)))
        return
    if chosen.tasks_dir is None:
        parser.error("--tasks-dir is missing")
    tasks = [name.strip() for name in chosen.tasks.split(",")]
    if unknown := [name for name in tasks if name not in TASKS]:
        parser.error(f"--tasks {unknown[0]}: there are {', '.join(TASKS)}")
    if importlib.util.find_spec("lm_eval") is None:
        parser.error("lm-evaluation-harness is not installed: pip install 'atoll[extras,eval]'")
    use_threads(chosen.threads)
    try:
        check_tasks(tasks, chosen.tasks_dir, chosen.limit)
        with tempfile.TemporaryDirectory(prefix="atoll-harness-") as name:
            trained = open_trained(chosen.run) if chosen.run else train_small(Path(name) / "run", chosen.threads)
            found = agreement(trained, tasks, chosen.tasks_dir, chosen.limit)
            line = line_of(trained, found, chosen.limit)
    except UserError as error:
        parser.error(str(error))
    print(f"{'task':14} {'examples':>8} {'too long':>8} {'metric':11} {'atoll eval':>12} {'lm_eval':>12}")
    for p in found:
        verdict = "PASS" if p.agree else "FAIL"
        print(f"{p.task:14} {p.examples:8} {p.too_long:8} {p.metric:11} {p.ours:12.6g} {p.theirs:12.6g}  {verdict}")
    print(json.dumps(line))
    if chosen.out:
        with chosen.out.open("a", encoding="utf8") as file:
            file.write(json.dumps(line) + "\n")
    sys.exit(0 if line["agree"] else 1)


if __name__ == "__main__":
    main()
