"""What runs beside the gateways: the sweeper, the journal puller, the replica mirror."""
