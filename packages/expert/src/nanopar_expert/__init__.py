"""Expert parallelism for mixture-of-experts layers."""
