"""The paper's human evaluation: which of two videos is better? Blind, in the browser.

diagd study --pairs pairs --make 10      # dream ten pairs: raster and k=1
diagd study --pairs pairs                # ask; prints where raters go
diagd study --pairs pairs --results --chart study.png
"""

import contextlib
from pathlib import Path
from typing import Any

from diagd.console import make_console
from diagd.web.guard import listen, url_of
from diagd.web.study.options import StudyOptions
from diagd.web.study.pairs import find_pairs, make_pairs
from diagd.web.study.results import print_results, write_chart
from diagd.web.study.server import study_server
from diagd.web.study.store import StudyStore


def main(options: StudyOptions) -> dict[str, Any]:
    """Make pairs, ask about them, or print the answers."""
    if options.make:
        systems = make_pairs(options)
        make_console().print(f"ask: diagd study --pairs {options.pairs}", soft_wrap=True)
        return {"pairs": str(options.pairs), "systems": systems, "num_pairs": options.make}
    path = options.answers or options.pairs / "study.db"
    if not options.results:
        return _ask(path, options)
    with contextlib.closing(StudyStore(path)) as store:
        results = store.results()
    if options.chart is not None:
        write_chart(results, options.chart)
    print_results(results, make_console())
    return results


def _ask(path: Path, options: StudyOptions) -> dict[str, Any]:
    with contextlib.ExitStack() as opened:
        listening = opened.enter_context(listen(options.host, options.port))
        port = listening.getsockname()[1]
        pairs = find_pairs(options.pairs, options.compare, options.questions)
        store = opened.enter_context(contextlib.closing(StudyStore(path, pairs)))
        address = url_of((*options.names, options.host)[0], port) + "/"
        lines = [f"{first} against {second}" for first, second in pairs.comparisons]
        lines += [f"{len(pairs.clips)} pairs each; answers go to {path}"]
        lines += [f"study    {address}", f"results  {address}results?key={store.results_key}"]
        make_console().print("\n".join(lines), soft_wrap=True)
        with contextlib.suppress(KeyboardInterrupt):
            study_server(pairs, store, options.seed, port, options.names).run(sockets=[listening])
    return {"address": address, "answers": str(path)}
