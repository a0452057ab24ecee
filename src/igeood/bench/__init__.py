"""The laboratory: data sets, networks, benchmark runs, figures, report, the paper's tables, demonstration."""
