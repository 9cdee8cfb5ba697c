"""The acts of the demo, in order: chat, rebalance under traffic, loss of a worker under traffic."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from examples.demo.forward import Forward
from examples.demo.kube import DemoError
from examples.demo.load import Reading, Workers, assignments, imbalance, predicted
from examples.demo.recording import Recorded, code_prompts
from examples.demo.report import MIN_IMBALANCE_BEFORE
from examples.demo.stage import DEPLOYMENT, Stage
from examples.demo.traffic import Outcomes, Traffic
from moe_api.plan import GroupPlan

PER_RANK = 3
MAX_TOKENS = 16
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
    """Recorded code prompts → imbalance → a recommended plan → the moves while the same prompts are
    served again and again → imbalance of one more replay, against what the plan promised."""
    forwards = stage.forwards()
    workers = stage.workers(forwards)
    recorded = code_prompts(len(forwards))
    answers = ask(forwards)
    try:
        since, now = _replay(stage, forwards, workers, recorded, "before")
        before = _known(imbalance(since, now))
        stage.measured.imbalance_before = before
        verdict = "shows a skew" if before >= MIN_IMBALANCE_BEFORE else "too even to show anything"
        stage.say(f"imbalance of recorded code prompts: [bold]{before:.3f}[/bold] ({verdict})")
        _recommendation(stage)
        epoch = int(stage.placement()["spec"]["epoch"])
        _set_mode(stage, "Auto", "the operator may act")
        traffic = Traffic(forwards, DEPLOYMENT, recorded, PER_RANK, MAX_TOKENS)
        try:
            during = ask(forwards)
            _settle(stage, epoch)
        finally:
            _note_traffic(stage, traffic.stop())
        _set_mode(stage, "Recommend", "the placement stays while the prompts are replayed")
        plan = GroupPlan.model_validate(stage.placement()["spec"])
        stage.measured.imbalance_predicted = predicted(plan, since, now)
        since, now = _replay(stage, forwards, workers, recorded, "after")
        stage.measured.imbalance_after = _known(imbalance(since, now))
        stage.measured.tokens_after = assignments(since, now)
        after = ask(forwards)
        stage.measured.answers_equal = all(answers) and answers == during == after
    finally:
        workers.close()
        for forward in forwards:
            forward.close()


def lose_a_worker(stage: Stage) -> None:
    """Kill one worker at once, under traffic; the survivors serve on, the deployment heals."""
    forwards = stage.forwards()
    victim = forwards[-1]
    recorded = code_prompts(len(forwards))
    traffic = Traffic(forwards, DEPLOYMENT, recorded, PER_RANK, MAX_TOKENS)
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


def _replay(
    stage: Stage,
    forwards: Sequence[Forward],
    workers: Workers,
    recorded: Sequence[Recorded],
    when: str,
) -> tuple[Reading, Reading]:
    """Send the recorded prompts once, show per-rank load live; the counters before and after."""
    since = now = workers.read()
    ranks = since.served_LR.shape[1]
    columns = (
        TextColumn("    {task.description}"), BarColumn(30),
        TextColumn("{task.fields[figure]}"), TimeElapsedColumn(),
    )  # fmt: skip
    traffic = Traffic(forwards, DEPLOYMENT, recorded, PER_RANK, MAX_TOKENS, once=True)
    deadline = time.monotonic() + TRAFFIC_SECONDS
    try:
        with Progress(*columns, console=stage.console) as progress:
            total = progress.add_task(f"prompts {when}", total=len(recorded), figure="")
            bars = [progress.add_task(f"  rank {r}", total=1, figure="") for r in range(ranks)]
            while traffic.running:
                if time.monotonic() > deadline:
                    raise DemoError(f"prompts are not answered within {TRAFFIC_SECONDS} s")
                time.sleep(0.5)
                now = workers.read()
                progress.update(total, completed=sum(traffic.outcomes.finished.values()),
                                figure=f"imbalance {imbalance(since, now) or 0:.3f}")  # fmt: skip
                _draw(progress, bars, since, now)
    finally:
        _note_traffic(stage, traffic.stop())
    now = workers.read()
    if len(set(now.epochs) | set(since.epochs)) > 1:
        raise DemoError(f"the placement changed while the prompts were replayed {when} it")
    return since, now


def _note_traffic(stage: Stage, outcomes: Outcomes) -> None:
    failed = sum(outcomes.failed.values())
    stage.measured.requests += sum(outcomes.finished.values()) + failed
    stage.measured.failed_requests += failed
    stage.measured.retried_requests += outcomes.retried
    for error in outcomes.errors[:5]:
        stage.say(f"[red]failed[/red] {error}")


def _known(figure: float | None) -> float:
    if figure is None:
        raise DemoError("the ranks counted no tokens")
    return figure


def _draw(progress: Progress, bars: Sequence[TaskID], since: Reading, now: Reading) -> None:
    """One bar per rank: its share of the layer that is worst off."""
    served_LR = now.served_LR - since.served_LR
    layer = int((served_LR.max(axis=1) / served_LR.sum(axis=1).clip(min=1)).argmax())
    for rank, bar in enumerate(bars):
        share = float(served_LR[layer, rank] / max(1.0, served_LR[layer].sum()))
        progress.update(bar, completed=share, figure=f"{share:5.1%} of layer {layer}")


def _set_mode(stage: Stage, mode: str, why: str) -> None:
    patch = json.dumps({"spec": {"rebalancing": {"mode": mode}}})
    stage.kube.kubectl("patch", "moed", DEPLOYMENT, "--type", "merge", "-p", patch)
    stage.say(f"spec.rebalancing.mode: {mode} – {why}")


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
    measured.imbalance_planned = stage.placement()["status"].get("imbalancePredicted")
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
