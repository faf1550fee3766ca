"""Engine replicas and gateways as the control plane sees them."""
