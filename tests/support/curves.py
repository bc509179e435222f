"""A script with metrics, and what the sinks of its run have afterwards."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

TRAIN = """
    import os, pathlib, signal, sys, time
    import torch
    import mlflow, wandb, torch.utils.tensorboard  # which sinks do too, in a thread, while the first steps are made
    import flk_runtime as flk

    steps, pause = int(sys.argv[1]), float(sys.argv[2])
    run = flk.init(save_every=5, log_every=2)
    run.log_hyperparameters(lr=0.1, optimizer={"name": "sgd", "betas": (0.9, 0.99)}, secret=os.environ.get("MY_TOKEN"))
    model = torch.nn.Linear(4, 1)
    model, optimizer = run.parallelize(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    begun = run.steps
    while run.steps < steps and not (run.attempt == 1 and run.steps > begun + 20):
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss=loss, attempt=run.attempt, part={"a": run.steps / 7}, text="none")
        if run.steps % 10 == 0:
            run.log(val=run.steps + run.attempt / 10)
        if steps == 1000 and (run.attempt, run.steps) == (0, 18):
            while not pathlib.Path("die").exists():
                time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(pause)
    print("logged in with", os.environ.get("MY_TOKEN"), *sys.argv[3:])
    run.close()
"""

Point = tuple[str, int]  # a name and a step
_OWN = {"_timestamp", "_runtime", "_step", "step"}  # columns of W&B


def printed(log: str) -> list[dict[Point, float]]:
    """The numbers of the lines of metrics in a log, in their order."""
    lines = []
    for text in re.findall(r'^(?:\[rank 0\] )?(\{"step".*\})$', log, re.MULTILINE):
        line = json.loads(text)
        step = line.pop("step")
        line |= {f"part/{name}": value for name, value in line.pop("part", {}).items()}
        lines.append({(name, step): value for name, value in line.items() if not isinstance(value, str)})
    return lines


def last(lines: list[dict[Point, float]]) -> dict[Point, float]:
    """For each name and step the value that was printed last."""
    return {point: value for line in lines for point, value in line.items()}


def points_of(values: Iterator[tuple[Point, float]]) -> dict[Point, float]:
    """The points of a run. None may be there twice."""
    found: dict[Point, float] = {}
    for point, value in values:
        assert point not in found, f"{point} is there twice"
        found[point] = value
    return found


def tensorboard_points(folder: Path) -> dict[str, dict[Point, float]]:
    """The points of each run below a folder, as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    reader = EventMultiplexer(size_guidance={"scalars": 0, "tensors": 0})
    reader.AddRunsFromDirectory(str(folder)).Reload()
    scalars = {run: reader.GetAccumulator(run) for run in reader.Runs()}
    return {
        run: points_of(
            ((tag, event.step), event.value) for tag in of_run.Tags()["scalars"] for event in of_run.Scalars(tag)
        )
        for run, of_run in scalars.items()
    }


def mlflow_points(address: str, experiment: str = "Default") -> dict[str, dict[Point, float]]:
    """The points of each run of an experiment."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=address)
    found = client.get_experiment_by_name(experiment)
    return {
        run.info.run_name: points_of(
            ((name, each.step), each.value)
            for name in run.data.metrics
            for each in client.get_metric_history(run.info.run_id, name)
        )
        for run in client.search_runs([found.experiment_id])
    }


def wandb_points(folder: Path) -> dict[str, dict[Point, float]]:
    """The points of each run, by its ID, in the files that W&B writes offline. Of steps done again, the latest."""
    runs: dict[str, dict[Point, float]] = {}
    for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        points = runs.setdefault(file.stem.removeprefix("run-"), {})
        for record in wandb_records(file):
            if record.HasField("history"):
                row = wandb_values(record.history.item)
                points |= {(name, row["step"]): value for name, value in row.items() if name not in _OWN}
    return runs


def wandb_values(items: Iterable[Any]) -> dict[str, Any]:
    """Return the values of the items of a record, by their names."""
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def wandb_records(file: Path) -> Iterator[Any]:
    """Yield the records in a file of a run: blocks as in LevelDB's log, after 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = file.read_bytes()
    at, content = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # too little for a header: zeros
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        chunk = data[at + 7 : at + 7 + length]
        if not kind or len(chunk) < length:
            return
        content = chunk if kind in (1, 2) else content + chunk
        at += 7 + length
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(content)
            yield record
