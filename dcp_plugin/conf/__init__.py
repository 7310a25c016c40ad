"""Configuration groups for Hydra applications: ``defaults: [dcp_plugin/checkpoint: async, dcp_plugin/resume: auto]``.

Three folders have to do with Hydra. This one has the groups, files of YAML alone, which are installed with the package.
``hydra_plugins/dcp_plugin_groups.py`` puts this folder into Hydra's search path; Hydra finds plugins in a top-level
package of that name only. ``configs/`` has the settings of ``examples/train.py``, made of these groups; it is no part
of the package.
"""
