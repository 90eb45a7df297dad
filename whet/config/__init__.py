"""Typed settings: the ``Config`` base, ``Component`` fields chosen by ``type:``, and recipes in YAML.

A recipe is read (``loading``) from YAML files and dotted overrides into a tree that remembers where each value came
from (``tree``) and checked against the ``Config`` classes (``schema``); errors are collected (``issues``). This package
does not know what the settings mean.
"""

from whet.config.base import Config
from whet.config.component import Component, component_path
from whet.config.issues import ConfigIssue, RecipeError, SettingsError
from whet.config.loading import RECIPES, Loaded, list_recipes, load
from whet.config.yaml_text import dump_yaml, parse_mapping

__all__ = [
    "RECIPES",
    "Component",
    "Config",
    "ConfigIssue",
    "Loaded",
    "RecipeError",
    "SettingsError",
    "component_path",
    "dump_yaml",
    "list_recipes",
    "load",
    "parse_mapping",
]
