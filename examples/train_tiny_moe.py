"""Trains the small Mixture-of-Experts model of the demo and the tests, on two CPU cores.

    python examples/train_tiny_moe.py --help

The parts are in `tiny_moe_training`; this file is the recipe: text, tokenizer, training, measures,
model card. The trained model is in `tiny-moe/`, so nobody has to run this.
"""

from __future__ import annotations

import argparse
import site
import sys
from pathlib import Path
from typing import Any

import torch
from tiny_moe_training import card, checkpoint, corpus, heldout, report, sources, vocabulary
from tiny_moe_training.model import ModelConfig, TinyMoE
from tiny_moe_training.trainer import TrainingConfig, train
from tokenizers import Tokenizer

HERE = Path(__file__).resolve().parent
PYTHON_PAGES = Path("/usr/share/doc/python3/html/_sources")

ABOUT = """\
Trains a Mixtral-architecture model of 3.9 million parameters (12 experts, 2 of them per token,
4 layers) on text found on this machine, and measures it.

  text       Python sources of the standard library and of permissively licensed packages, the
             Python documentation, and translations that packages carry (German, French, Spanish).
             Whole files are held out for the measures.
  balancing  'loss' adds an auxiliary loss that is smallest when all experts are used equally;
             'bias' has no such loss and moves a bias on the router logits against the load (the
             bias fades out before the end, as the checkpoint has no place for it). Less balancing
             lets experts specialise: then one kind of traffic loads few of them, which is what
             the demo needs.
  states     A run can be interrupted at any time and started again with the same arguments: it
             goes on from the last state in --work. Before the last 35 % of the steps, in which
             the learning rate falls to zero, --steps may be changed too.

Text for a run like ours, beside what the project itself needs:
  apt-get install python3-doc
  pip install --no-deps --target TEXT django wagtail sphinx jupyterlab-language-pack-de-DE \\
      jupyterlab-language-pack-fr-FR jupyterlab-language-pack-es-ES
  python examples/train_tiny_moe.py --packages TEXT
"""


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.use_deterministic_algorithms(True)
    if options.evaluate:
        return _evaluate(options.out, report.kept_parts(options.out))
    options.work.mkdir(parents=True, exist_ok=True)
    tokenizer, streams, text = _prepared_text(options)
    config = _training_config(options)
    train(
        _new_model(options.seed),
        streams,
        config,
        options.work / "state.pt",
        lambda trained: checkpoint.save_model(trained, tokenizer, options.out),
        options.save_every,
    )
    heldout.write(options.out / "heldout", text)
    return _evaluate(options.out, report.known_from_training(text, config))


def _evaluate(folder: Path, kept: dict[str, Any]) -> int:
    """Measures the model of a folder, writes metrics.json and the card; 1 if it is not good
    enough."""
    _say("measuring")
    metrics = report.measure_folder(folder, kept)
    report.write(folder, metrics)
    card.write_card(folder, metrics)
    print(report.table(metrics))
    for failure in report.failures(metrics):
        print(f"not good enough: {failure}")
    return 1 if report.failures(metrics) else 0


def _prepared_text(
    options: argparse.Namespace,
) -> tuple[Tokenizer, dict[str, torch.Tensor], corpus.Corpus]:
    """Tokenizer, token streams and corpus; from the work folder if an earlier run left them."""
    ready = options.work / "text.pt"
    if not ready.exists():
        _say("reading and cleaning text (minutes)")
        folders = [Path(p) for p in site.getsitepackages()] + options.packages
        text = corpus.build(sources.find_files(folders, options.pages), options.seed)
        _say("training the tokenizer")
        sample = [d for kind in corpus.KINDS for d in _share(text.documents[kind], kind)]
        tokenizer = vocabulary.train_tokenizer(sample, ModelConfig().vocab_size)
        _say("encoding")
        streams = {kind: _encode(tokenizer, text.documents[kind]) for kind in corpus.KINDS}
        tokenizer.save(str(options.work / "tokenizer.json"))
        torch.save({"streams": streams, "corpus": text}, ready)
    prepared = torch.load(ready, weights_only=False)  # written by this script
    for kind, stream in prepared["streams"].items():
        _say(f"{kind}: {len(stream):,} tokens")
    return checkpoint.load_tokenizer(options.work), prepared["streams"], prepared["corpus"]


def _share(documents: list[str], kind: str) -> list[str]:
    """So much of a kind that the tokenizer's merges serve all kinds."""
    most = {"code": 4, "english": 4, "other": 1, "chat": 2}[kind] * sources.MEGABYTE
    taken, characters = [], 0
    for document in documents:
        if characters < most:
            taken.append(document)
            characters += len(document)
    return taken


def _encode(tokenizer: Tokenizer, documents: list[str]) -> torch.Tensor:
    """All documents in one row, each followed by the end token."""
    ids: list[torch.Tensor] = []
    for encoding in tokenizer.encode_batch_fast(documents):
        ids.append(torch.tensor([*encoding.ids, vocabulary.END_ID], dtype=torch.long))
    return torch.cat(ids)


def _new_model(seed: int) -> TinyMoE:
    torch.manual_seed(seed)
    return TinyMoE(ModelConfig())


def _training_config(options: argparse.Namespace) -> TrainingConfig:
    return TrainingConfig(
        steps=options.steps,
        seed=options.seed,
        sequence_tokens=options.sequence_tokens,
        batch_sequences=options.batch_sequences,
        learning_rate=options.learning_rate,
        balancing=options.balancing,
        auxiliary_coefficient=options.auxiliary_coefficient,
        bias_step=options.bias_step,
        router_noise=options.router_noise,
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, default=HERE / "tiny-moe", help="folder of the model (%(default)s)")
    add("--work", type=Path, default=Path("build/tiny-moe"), help="states and prepared text")
    add("--packages", type=Path, action="append", default=[], help="more packages to read from")
    add("--pages", type=Path, default=PYTHON_PAGES, help="Python documentation, _sources folder")
    add("--evaluate", action="store_true", help="measure the model in --out, do not train")
    add("--seed", type=int, default=1, help="decides all that is random (%(default)s)")
    add("--threads", type=int, default=2, help="CPU threads (%(default)s)")
    add("--steps", type=int, default=1700, help="optimizer steps (%(default)s)")
    add("--save-every", type=int, default=50, help="steps between states (%(default)s)")
    add("--sequence-tokens", type=int, default=256, help="tokens of a sequence (%(default)s)")
    add("--batch-sequences", type=int, default=8, help="sequences of a step (%(default)s)")
    add("--learning-rate", type=float, default=3e-3, help="highest rate (%(default)s)")
    add("--balancing", choices=("loss", "bias"), default="loss", help="method (%(default)s)")
    add(
        "--auxiliary-coefficient",
        type=float,
        default=0.001,
        help="weight of the balancing loss (%(default)s)",
    )
    add("--bias-step", type=float, default=0.001, help="step of the bias (%(default)s)")
    add(
        "--router-noise",
        type=float,
        default=0.0,
        help="standard deviation of noise on the router logits while training (%(default)s)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
