"""The computation of one pipeline stage in torch: forwards, split backwards, sums of gradients."""
