"""`flk plan` and `flk bench`: predictions for a model, and measurements of strategies that later plans use."""
