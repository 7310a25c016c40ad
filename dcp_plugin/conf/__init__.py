"""Configuration groups for Hydra applications: ``defaults: [dcp_plugin/checkpoint: async, dcp_plugin/resume: auto]``.

Files of YAML alone; ``hydra_plugins/dcp_plugin_groups.py`` puts this folder into Hydra's search path.
"""
