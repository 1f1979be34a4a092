"""Find the fastest strategy that a model can afford, by what it costs in likelihood.

diagd tune --tokens tokens/heldout --tolerance 0.05
diagd tune --tokens tokens/heldout --strategy k=1 k=2/predecessor zipar=4
diagd tune --tokens tokens --model world --make-default
diagd tune --tokens tokens/heldout --by row column --out tune    # plots
"""

from typing import Any

from diagd.training.tuning import TuneOptions, make_default, print_tuning, tune, write_tuning


def main(options: TuneOptions) -> dict[str, Any]:
    """Measure, print the table, and write the files where asked for."""
    document = tune(options)
    if options.make_default:
        make_default(document, options)
    print_tuning(document, options)
    if options.out is not None:
        write_tuning(document, options, options.out)
    return document
