#!/usr/bin/env python3
"""Check that lm-eval scores the server as it scores the same weights in transformers, both in float32.

    scripts/check_lm_eval.py --plan tiny --lm-eval venv/bin/lm_eval

The task is made here, of the bundled prompts: which continuation is a text's own (log-likelihoods of four), and how it
goes on (greedy text). It needs no network. Scores must be equal, and so must every answer behind them: log-likelihoods
to a thousandth, greedy text to the letter.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from served import ROOT, serving

from yggdrasil.artifacts import current_machine, resolve_plan
from yggdrasil.checkpoints.source import Source
from yggdrasil.cli import run_script
from yggdrasil.errors import YggdrasilError
from yggdrasil.prompts import SHIPPED
from yggdrasil.scheduling.plan import Plan

CLOSE = 1e-3  # log-likelihoods of whole continuations
TASK = """
task: local_{kind}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
doc_to_text: "{{{{text}}}}"
"""
CHOICE = 'output_type: multiple_choice\ndoc_to_choice: "{{choices}}"\ndoc_to_target: "{{label}}"\n'
GREEDY = (
    'output_type: generate_until\ndoc_to_target: "{{own}}"\n'
    'generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 24, do_sample: false}\n'
    "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n"
)


def main(
    plan: Annotated[str, typer.Option(help="A plan file, or a name that has a plan for this machine.")],
    lm_eval: Annotated[Path, typer.Option(help="The program lm_eval, of an environment with lm-eval[api] and torch.")],
    documents: Annotated[int, typer.Option(min=4, help="Texts of the task.")] = 24,
) -> None:
    """Print both scores; a difference is a sentence and exit code 2."""
    import torch

    found = Plan.load(resolve_plan(plan, current_machine()))
    folder = Source.find(found.target.path()).checkpoint(torch.float32)
    with tempfile.TemporaryDirectory() as work, serving(plan, "--dtype", "float32") as url:
        tasks = _write_tasks(Path(work), documents)
        ours = f"model={plan},base_url={url}/v1/completions,tokenizer={folder},num_concurrent=1"
        served = _run(lm_eval, "local-completions", ours, tasks, Path(work) / "served")
        plain = _run(lm_eval, "hf", f"pretrained={folder},dtype=float32", tasks, Path(work) / "plain")
    for task, scores in plain["scores"].items():
        if served["scores"][task] != scores:
            raise YggdrasilError(f"{task}: the server scores {served['scores'][task]}, transformers {scores}")
    worst = _compare(served["answers"], plain["answers"])
    print(f"{documents} documents, equal scores: {json.dumps(plain['scores'])}; log-likelihoods differ by {worst:.1e}")


def _write_tasks(work: Path, count: int) -> Path:
    """Texts cut in two, each with its own rest and three others', and the tasks that read them."""
    lines = (SHIPPED / "chat.jsonl").read_text(encoding="utf-8").splitlines()
    words = [str(json.loads(line)["prompt"]).split() for line in lines]
    texts = [each for each in words if len(each) >= 8][:count]
    cut = [(" ".join(each[:-4]), " " + " ".join(each[-4:])) for each in texts]
    records = []
    for i, (text, own) in enumerate(cut):
        others = [cut[(i + step) % len(cut)][1] for step in (1, 2, 3)]
        label = i % 4
        records.append({"text": text, "own": own, "choices": [*others[:label], own, *others[label:]], "label": label})
    file = work / "documents.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    folder = work / "tasks"
    folder.mkdir()
    for kind, rest in (("choice", CHOICE), ("greedy", GREEDY)):
        (folder / f"{kind}.yaml").write_text(TASK.format(kind=kind, file=file) + rest, encoding="utf-8")
    return folder


def _run(program: Path, model: str, arguments: str, tasks: Path, out: Path) -> dict[str, Any]:
    """Scores by task, and every answer by task and document."""
    command = [
        str(program), "--model", model, "--model_args", arguments, "--tasks", "local_choice,local_greedy",
        "--include_path", str(tasks), "--output_path", str(out), "--log_samples",
        "--device", "cpu", "--batch_size", "1",
    ]  # fmt: skip
    quiet = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=quiet, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise YggdrasilError(f"lm_eval with {model} failed: {' '.join(last)}")
    results = json.loads(next(out.rglob("results_*.json")).read_text(encoding="utf-8"))["results"]
    scores = {
        task: {name: value for name, value in row.items() if isinstance(value, float) and "stderr" not in name}
        for task, row in results.items()
    }
    answers = {}
    for file in out.rglob("samples_*.jsonl"):
        for line in file.read_text(encoding="utf-8").splitlines():
            sample = json.loads(line)
            answers[file.name.rpartition("_")[0], sample["doc_id"]] = sample["filtered_resps"]
    return {"scores": scores, "answers": answers}


def _compare(served: dict[Any, Any], plain: dict[Any, Any]) -> float:
    """The largest difference of two log-likelihoods; all else must be the same."""
    if served.keys() != plain.keys() or not served:
        raise YggdrasilError("the two runs have answered different documents")
    worst = 0.0
    for place, answers in plain.items():
        for ours, theirs in zip(served[place], answers, strict=True):
            if isinstance(theirs, str) or ours[1] != theirs[1]:
                if ours != theirs:
                    raise YggdrasilError(
                        f"{place[0]}, document {place[1]}: {ours!r} served, {theirs!r} in transformers"
                    )
                continue
            worst = max(worst, abs(float(ours[0]) - float(theirs[0])))
    if worst > CLOSE:
        raise YggdrasilError(f"log-likelihoods differ by {worst:.2e}")
    return worst


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    run_script(main, "check_lm_eval")
