"""The acts of the demo, in order: chat, rebalance under traffic, loss of a worker under traffic."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from examples.demo.forward import Forward
from examples.demo.kube import DemoError
from examples.demo.load import Reading, Workers, assignments, imbalance
from examples.demo.report import MIN_IMBALANCE_BEFORE, assignments_for
from examples.demo.stage import DEPLOYMENT, Stage
from examples.demo.traffic import Traffic

MODEL_FOLDER = Path(__file__).resolve().parents[1] / "tiny-moe"
NOISE_BEFORE, NOISE_AFTER = 0.03, 0.02
PER_RANK = 3
MAX_TOKENS = 16
PROMPT_CHARACTERS = 400
TRAFFIC_SECONDS = 240
SETTLE_SECONDS = 120
RECOVERY_SECONDS = 180
QUESTIONS = ("def main(argv):", "The list of files", "import os\n\nclass")


def chat(stage: Stage) -> None:
    """Stream one answer through a port-forward of the Service."""
    forward = Forward(stage.kube, f"service/{DEPLOYMENT}")
    body = {
        "model": DEPLOYMENT, "stream": True, "max_tokens": 48, "temperature": 0,
        "messages": [{"role": "user", "content": "What does this function return?"}],
    }  # fmt: skip
    url = forward.url()
    asked, text = time.monotonic(), ""
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json=body, timeout=60, trust_env=False
    ) as answer:
        if answer.status_code != 200:
            raise DemoError(f"chat: {answer.status_code}: {answer.read().decode()[:300]}")
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            delta = json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content")
            if delta and stage.measured.first_token_seconds is None:
                stage.measured.first_token_seconds = time.monotonic() - asked
            text += delta or ""
    forward.close()
    stage.console.print("    user:      What does this function return?", markup=False)
    stage.console.print(f"    assistant: {text.strip()}", markup=False)


def rebalance(stage: Stage) -> None:
    """Code traffic → imbalance → a recommended plan → the moves while serving → imbalance after."""
    forwards = stage.forwards()
    workers = stage.workers(forwards)
    answers = ask(forwards)
    traffic = Traffic(forwards, DEPLOYMENT, code_prompts(), PER_RANK, MAX_TOKENS)
    try:
        before = _watch(stage, workers, "before", NOISE_BEFORE)
        stage.measured.imbalance_before = before
        verdict = "shows a skew" if before >= MIN_IMBALANCE_BEFORE else "too even to show anything"
        stage.say(f"imbalance of code traffic: [bold]{before:.3f}[/bold] ({verdict})")
        _recommendation(stage)
        epoch = int(stage.placement()["spec"]["epoch"])
        stage.kube.kubectl(
            "patch", "moed", DEPLOYMENT, "--type", "merge",
            "-p", '{"spec":{"rebalancing":{"mode":"Auto"}}}',
        )  # fmt: skip
        stage.say("spec.rebalancing.mode: Auto – the operator may act")
        during = ask(forwards)
        _settle(stage, epoch)
        stage.measured.imbalance_after = _watch(stage, workers, "after", NOISE_AFTER)
        after = ask(forwards)
        stage.measured.answers_equal = all(answers) and answers == during == after
    finally:
        outcomes = traffic.stop()
        workers.close()
        for forward in forwards:
            forward.close()
    stage.measured.requests = sum(outcomes.finished.values()) + sum(outcomes.failed.values())
    stage.measured.failed_requests = sum(outcomes.failed.values())
    stage.measured.retried_requests = outcomes.retried
    for error in outcomes.errors[:5]:
        stage.say(f"[red]failed[/red] {error}")


def lose_a_worker(stage: Stage) -> None:
    """Kill one worker at once, under traffic; the survivors serve on, the deployment heals."""
    forwards = stage.forwards()
    victim = forwards[-1]
    traffic = Traffic(forwards, DEPLOYMENT, code_prompts(), PER_RANK, MAX_TOKENS)
    try:
        stage.kube.wait(
            "answers of every rank before the kill",
            lambda: len(traffic.outcomes.finished) == len(forwards), 60,
        )  # fmt: skip
        generation = int(stage.placement()["spec"]["generation"])
        killed = time.monotonic()
        stage.kube.kubectl("delete", victim.target, "--grace-period=0", "--force")
        traffic.give_up_on(victim.target)
        stage.say(f"killed {victim.target}")
        stage.kube.wait(
            "the survivors' generation",
            lambda: int(stage.placement()["spec"]["generation"]) > generation, 60,
            stage.why_not_ready,
        )  # fmt: skip
        served = _first_answer_after(traffic, time.monotonic(), victim, stage)
        stage.measured.survivors_serving_seconds = served - killed
        stage.say(f"survivors answer again {served - killed:.2f} s after the kill")
        stage.kube.wait(
            "the deployment to be Ready again",
            lambda: stage.is_ready() and int(stage.placement()["spec"]["generation"]) > generation,
            RECOVERY_SECONDS, stage.why_not_ready,
        )  # fmt: skip
        stage.measured.recovery_seconds = time.monotonic() - killed
    finally:
        outcomes = traffic.stop()
        for forward in forwards:
            forward.close()
    measured = stage.measured
    measured.requests += sum(outcomes.finished.values()) + sum(outcomes.failed.values())
    measured.retried_requests += outcomes.retried
    measured.failed_on_killed_rank = outcomes.failed[victim.target]
    measured.failed_on_survivors = sum(outcomes.failed.values()) - measured.failed_on_killed_rank
    for error in outcomes.errors[:5]:
        stage.say(f"[yellow]lost[/yellow] {error}")


def code_prompts() -> list[str]:
    """Pieces of code that the model has not been trained on."""
    text = (MODEL_FOLDER / "heldout" / "code.txt").read_text()
    starts = range(0, len(text) - PROMPT_CHARACTERS, PROMPT_CHARACTERS)
    pieces = [text[start : start + PROMPT_CHARACTERS] for start in starts]
    random.Random(0).shuffle(pieces)
    return pieces


def ask(forwards: Sequence[Forward]) -> list[str]:
    """Greedy answers of every rank to a few questions; they must not change with the placement."""
    asked = [(forward, question) for forward in forwards for question in QUESTIONS]
    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(lambda pair: _greedy_answer(*pair), asked))


def _greedy_answer(forward: Forward, question: str) -> str:
    body = {"model": DEPLOYMENT, "prompt": question, "max_tokens": 20, "temperature": 0}
    reply = httpx.post(f"{forward.url()}/v1/completions", json=body, timeout=120, trust_env=False)
    if reply.status_code != 200:
        raise DemoError(f"{forward.target}: {reply.status_code}: {reply.text[:300]}")
    text: str = reply.json()["choices"][0]["text"]
    return text


def _watch(stage: Stage, workers: Workers, when: str, wanted_noise: float) -> float:
    """Show per-rank load live until the imbalance is known to within `wanted_noise`."""
    since = now = workers.read()
    ranks = since.served_LR.shape[1]
    wanted = assignments_for(ranks, wanted_noise)
    columns = (
        TextColumn("    {task.description}"), BarColumn(30),
        TextColumn("{task.fields[figure]}"), TimeElapsedColumn(),
    )  # fmt: skip
    deadline = time.monotonic() + TRAFFIC_SECONDS
    with Progress(*columns, console=stage.console) as progress:
        total = progress.add_task(f"traffic {when}", total=wanted, figure="")
        bars = [progress.add_task(f"  rank {rank}", total=1, figure="") for rank in range(ranks)]
        while (seen := assignments(since, now)) < wanted:
            if time.monotonic() > deadline:
                raise DemoError(f"{seen} of {wanted} assignments after {TRAFFIC_SECONDS} s")
            time.sleep(0.5)
            now = workers.read()
            if len(set(now.epochs) | set(since.epochs)) > 1:  # a plan changed: count anew
                since = now
            progress.update(total, completed=assignments(since, now),
                            figure=f"imbalance {imbalance(since, now) or 0:.3f}")  # fmt: skip
            _draw(progress, bars, since, now)
    if when == "after":
        stage.measured.tokens_after = assignments(since, now)
    found = imbalance(since, now)
    assert found is not None, "enough tokens were counted"
    return found


def _draw(progress: Progress, bars: Sequence[TaskID], since: Reading, now: Reading) -> None:
    """One bar per rank: its share of the layer that is worst off."""
    served_LR = now.served_LR - since.served_LR
    layer = int((served_LR.max(axis=1) / served_LR.sum(axis=1).clip(min=1)).argmax())
    for rank, bar in enumerate(bars):
        share = float(served_LR[layer, rank] / max(1.0, served_LR[layer].sum()))
        progress.update(bar, completed=share, figure=f"{share:5.1%} of layer {layer}")


def _recommendation(stage: Stage) -> None:
    """Wait for the dry run: what the operator would do, and why."""
    stage.kube.wait(
        "a recommended rebalance in status.decisions",
        lambda: bool(_decisions(stage, "Recommended")), SETTLE_SECONDS,
        lambda: f"decisions: {stage.deployment().get('status', {}).get('decisions')}",
    )  # fmt: skip
    decision = _decisions(stage, "Recommended")[0]
    stage.say(f"the operator recommends: {decision.get('message', '')}")


def _settle(stage: Stage, epoch_before: int) -> None:
    """Wait until the walk has arrived, and print its epochs."""
    shown = epoch_before

    def arrived() -> bool:
        nonlocal shown
        if (applied := int(stage.placement().get("status", {}).get("appliedEpoch", 0))) > shown:
            shown = applied
            stage.say(f"epoch {applied} in force on every rank")
        idle = stage.condition("Rebalancing").get("reason") == "Idle"
        return bool(_decisions(stage, "Applied")) and shown > epoch_before and idle

    stage.kube.wait(
        "the rebalance to be applied", arrived, SETTLE_SECONDS,
        lambda: f"decisions: {stage.deployment().get('status', {}).get('decisions')}",
    )  # fmt: skip
    applied = _decisions(stage, "Applied")
    stalls = [each["measuredStallMillis"] for each in applied if "measuredStallMillis" in each]
    measured = stage.measured
    measured.epoch = shown
    measured.moves = sum(int(each.get("moves", 0)) for each in applied)
    measured.imbalance_predicted = stage.placement()["status"].get("imbalancePredicted")
    measured.swap_stall_millis = max(stalls, default=None)
    for each in reversed(applied):
        stage.say(f"applied: {each['message']}")
    stage.say(f"{measured.moves} experts moved while serving, epoch {epoch_before} → {shown}")


def _decisions(stage: Stage, verdict: str) -> list[dict[str, Any]]:
    """Decisions with this verdict, newest first; the deployment is as young as this demo."""
    decisions = stage.deployment().get("status", {}).get("decisions", [])
    return [decision for decision in decisions if decision["verdict"] == verdict]


def _first_answer_after(traffic: Traffic, since: float, victim: Forward, stage: Stage) -> float:
    """When a survivor first answered after `since` (monotonic seconds)."""

    def later() -> list[float]:
        done = list(traffic.outcomes.done_at)
        return [at for at, target in done if at > since and target != victim.target]

    stage.kube.wait("an answer from a survivor", lambda: bool(later()), 60, stage.why_not_ready)
    return min(later())
