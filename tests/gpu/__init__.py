"""Run on a machine with GPUs what it can teach about keras_dp, and report it part by part."""
