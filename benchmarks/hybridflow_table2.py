"""Table 2 of the HybridFlow paper (arXiv 2409.19256) by counting: what each design moves, holds and keeps twice, on
eight processes.

`make bench NAME=hybridflow_table2`; `ARGS=--json` prints the counts alone. Counts, not times: they hold on any machine.
"""

from __future__ import annotations

from support import conditions

if __name__ == "__main__":
    conditions.ensure()

import json
import sys

from support.pool import Pool, free_port
from support.report import Figure, write
from support.transition_ranks import COLUMNS, LAYERS, ROWS, Setting

DESIGNS = {"ds_chat": "DS-Chat", "hybridflow_v": "HybridFlow-V", "hybridflow": "HybridFlow"}
SETTINGS = (Setting(p=2, t=4, d=1, t_g=2), Setting(p=1, t=4, d=2, t_g=2))
MODEL_BYTES = LAYERS * ROWS * COLUMNS * 4


def counts() -> list[dict[str, object]]:
    """The bytes of the busiest rank, for every setting and design."""
    pool = Pool(8, "support.transition_ranks:Ranks", port=free_port(), world=8)
    found: list[dict[str, object]] = []
    try:
        for setting in SETTINGS:
            for design in DESIGNS:
                ranks = pool.run("transition", design, *(getattr(setting, n) for n in ("p", "t", "d", "t_g")))
                most = {key: max(rank[key] for rank in ranks) for key in ("received", "peak", "redundancy")}
                found.append({**vars(setting), "design": design, "model": MODEL_BYTES, **most})
    finally:
        pool.stop()
    return found


def main() -> None:
    """Count, and write the results."""
    found = counts()
    if "--json" in sys.argv:
        print(json.dumps(found))
        return
    figures = [
        Figure(
            f"p{f['p']} t{f['t']} d{f['d']} to t_g{f['t_g']}, {DESIGNS[str(f['design'])]}: {key}",
            float(str(f[key])),
            "bytes",
        )
        for f in found
        for key in ("received", "peak", "redundancy")
    ]
    write("hybridflow_table2", figures, {"model_bytes": MODEL_BYTES})


if __name__ == "__main__":
    main()
