"""What a step needs of the device it runs on: one copy up, CUDA graphs, and a plan of its memory."""
