"""Steps of a run taken again: kept batches, their checks, and where two computations part."""
