"""Everything about evidence: experiments, figures, the report, the explorer, diagnostics."""
