"""Constants of GPUs fitted to measured whole layers."""
