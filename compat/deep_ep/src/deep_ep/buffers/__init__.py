"""Where DeepEP 2 keeps the shapes of its buffers: `legacy` is V1's, `elastic` V2's."""
