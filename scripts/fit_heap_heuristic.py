"""Fit the curves in ``sb3_extra_buffers.compatibility.device`` to the measured compression ratios.

    python scripts/fit_heap_heuristic.py            # print the curves
    python scripts/fit_heap_heuristic.py --check    # fail if the module has other curves

Each family of methods with levels gets a polynomial of the level. The number of points limits its degree.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np

from sb3_extra_buffers.compatibility.device import CURVES, RATIOS_BY_LEVEL, Curve

HIGHEST_DEGREE = 4


def fit() -> dict[str, Curve]:
    curves = {}
    for family, measured in RATIOS_BY_LEVEL.items():
        levels, ratios = zip(*sorted(measured.items()), strict=True)
        degree = min(HIGHEST_DEGREE, len(levels) - 1)
        coefficients = tuple(float(f"{value:.6g}") for value in np.polyfit(levels, ratios, degree))
        curves[family] = Curve(coefficients, (min(levels), max(levels)), (min(ratios), max(ratios)))
    return curves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the module's curves instead of printing")
    arguments = parser.parse_args()
    curves = fit()
    if arguments.check:
        sys.exit(0 if curves == CURVES else "compatibility/device.py is out of date. See the output without --check.")
    for family, curve in curves.items():
        print(f'    "{family}": {curve.coefficients},')


if __name__ == "__main__":
    main()
