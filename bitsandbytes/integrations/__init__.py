"""Optional glue for other libraries. Nothing else of this package imports it; each module is imported by its user.

`diffusers`, `accelerate` and `peft` open these libraries' own device gates for Ascend NPUs: see docs/integrations.md.
"""
