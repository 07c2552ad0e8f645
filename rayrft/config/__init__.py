"""Configuration: one YAML file, one pydantic section per part, every rule checked before any actor starts."""

from rayrft.config.load import (
    dump_config,
    load_config,
    load_folder_config,
    load_run_config,
    parse_override,
    read_config,
)
from rayrft.config.pipelines import OperatorConfig, PipelineConfig
from rayrft.config.run import FolderConfig, RunConfig
from rayrft.config.stage import StageConfig
from rayrft.config.tasks import TasksConfig, TaskSourceConfig

__all__ = [
    "FolderConfig", "OperatorConfig", "PipelineConfig", "RunConfig", "StageConfig", "TaskSourceConfig", "TasksConfig",
    "dump_config", "load_config", "load_folder_config", "load_run_config", "parse_override", "read_config",
]  # fmt: skip
