"""Fit the curves of ``sb3_extra_buffers.compatibility.device`` to the ratios measured.

    python scripts/fit_heap_heuristic.py            # print the curves
    python scripts/fit_heap_heuristic.py --check    # fail if those in the module are others

For every family of methods with levels, a polynomial of the level, of a degree that the number of points allows.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np

from sb3_extra_buffers.codecs.registry import parse_method
from sb3_extra_buffers.compatibility.device import CURVES, MEASURED_RATIOS, Curve

HIGHEST_DEGREE = 4


def fit() -> dict[str, Curve]:
    points: dict[str, list[tuple[int, float]]] = {}
    for text, ratio in MEASURED_RATIOS.items():
        method = parse_method(text)
        if method.level is not None:
            points.setdefault(method.name, []).append((method.level, ratio))
    curves = {}
    for family, measured in points.items():
        levels, ratios = zip(*sorted(measured), strict=True)
        degree = min(HIGHEST_DEGREE, len(levels) - 1)
        coefficients = tuple(float(f"{value:.6g}") for value in np.polyfit(levels, ratios, degree))
        curves[family] = Curve(coefficients, (min(levels), max(levels)), (min(ratios), max(ratios)))
    return curves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the module instead")
    arguments = parser.parse_args()
    curves = fit()
    if arguments.check:
        sys.exit(0 if curves == CURVES else "The curves in compatibility/device.py are not those fitted.")
    for family, curve in curves.items():
        print(f'    "{family}": {curve.coefficients},')


if __name__ == "__main__":
    main()
