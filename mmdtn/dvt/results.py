"""Reads, formats and writes a cascade's accuracy as a function of its cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmdtn.checkpoints import to_dvt

from .budget import NOBODY, Outcome
from .classifier import DVT

STORED = ('flops', 'anytime_classification', 'dynamic_threshold', 'budgeted_batch_classification')


@dataclass
class BudgetCurve:
    """Mean GFLOPs, and accuracy in percent, for each of P rows of thresholds.

    Args:
        gflops: The cost of each exit if all images leave there. anytime: The accuracy of each exit if all images leave
        there. thresholds: The thresholds, ``P x K``. mean_gflops: The mean cost of each row. accuracy: The accuracy of
        each row. left: Number of images that leave at each exit, ``P x K``. Published files do not contain these
        numbers.
    """

    gflops: list[float]
    anytime: list[float]
    thresholds: Tensor
    mean_gflops: list[float]
    accuracy: list[float]
    left: Tensor | None = None

    @classmethod
    def of(
        cls, gflops: Sequence[float], anytime: Sequence[float], thresholds: Tensor, outcome: Outcome
    ) -> 'BudgetCurve':
        return cls(
            list(gflops), list(anytime), thresholds, outcome.gflops.tolist(), outcome.accuracy.tolist(), outcome.left
        )

    @classmethod
    def stored(cls, checkpoint: dict[str, Any], file: str) -> 'BudgetCurve':
        """Reads the curve that a published checkpoint stores next to its weights."""
        if missing := [key for key in STORED if key not in checkpoint]:
            raise ValueError(
                f'{file} has no {", ".join(missing)}: the checkpoint has no stored results. Use --mode 2 to '
                'find thresholds, and --publish to write a checkpoint with results.'
            )
        gflops, accuracy = checkpoint['budgeted_batch_classification']
        return cls(
            _floats(checkpoint['flops']),
            _floats(checkpoint['anytime_classification']),
            torch.as_tensor(checkpoint['dynamic_threshold']).float(),
            _floats(gflops),
            _floats(accuracy),
        )

    def by_chance(self) -> list[float]:
        """Returns the accuracy that each row would have if the images leaving at each exit were drawn at random.

        The list is empty if the curve has no ``left``.
        """
        return [] if self.left is None else (self._shares() @ torch.tensor(self.anytime, dtype=torch.double)).tolist()

    def _shares(self) -> Tensor:
        assert self.left is not None
        return self.left.double() / self.left.sum(1, keepdim=True)

    def points(self) -> list[dict[str, Any]]:
        """Returns the rows as dicts for JSON."""
        out = []
        for i, (row, gflops, accuracy) in enumerate(
            zip(self.thresholds.tolist(), self.mean_gflops, self.accuracy, strict=True)
        ):
            point = dict(gflops=gflops, accuracy=accuracy, thresholds=row)
            if self.left is not None:
                point |= dict(shares=self._shares()[i].tolist(), by_chance=self.by_chance()[i])
            out.append(point)
        return out

    def table(self, rows: int = 12) -> str:
        """Formats some evenly spaced rows as a table."""
        exits = len(self.gflops)
        heads = ''.join(f'exit {k} at'.rjust(12) for k in range(1, exits))
        lines = [f'GFLOPs   top-1   {heads}' + '   left at each; top-1 if at random' * (self.left is not None)]
        for i in torch.linspace(0, len(self.accuracy) - 1, min(rows, len(self.accuracy))).long().tolist():
            line = f'{self.mean_gflops[i]:<7.4g} {self.accuracy[i]:6.2f}   '
            at = ['nobody' if t >= NOBODY else f'{t:.4f}' for t in self.thresholds[i, :-1].tolist()]
            line += ''.join(word.rjust(12) for word in at)
            if self.left is not None:
                line += '   ' + ' '.join(f'{100 * share:.1f}%' for share in self._shares()[i].tolist())
                line += f'; {self.by_chance()[i]:.2f}'
            lines.append(line)
        return '\n'.join(lines)


def published_file(model: DVT, curve: BudgetCurve) -> dict[str, Any]:
    """Returns the content of a published checkpoint: the curve, and the weights under the authors' names."""
    return dict(
        model_state_dict={key: value.cpu().clone() for key, value in to_dvt(model).items()},
        flops=curve.gflops,
        anytime_classification=curve.anytime,
        dynamic_threshold=curve.thresholds,
        budgeted_batch_classification=[curve.mean_gflops, curve.accuracy],
    )


def _floats(values: Any) -> list[float]:
    return [float(value) for value in values]
