"""GPU telemetry through NVML: clocks, power, links, errors."""
