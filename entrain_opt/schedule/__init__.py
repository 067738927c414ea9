"""Who does what when: pure, deterministic lists of actions that the simulator and the runtime both replay."""
