"""What a configuration costs on a TPU topology, asked of the TPU compiler itself."""
