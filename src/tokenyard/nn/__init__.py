"""Expert parallelism in models: differentiable functions, and a layer made of them."""
