"""Old paths of modules. Recipes and run folders of earlier versions may name a class by its old path."""

# New package: the old modules, below ``whet``, each with its new name where the name changed.
_MOVED = {
    "whet.algorithms": (
        "algorithms.dpo=preference algorithms.online_dpo=preference algorithms.kto=preference "
        "algorithms.reward_model=preference"
    ),
    "whet.base": "closing errors files lazy seeds visible=escaping progress",
    "whet.chat": (
        "data.renderer data.calls data.call_formats data.control_tokens data.replies data.tools_as_text data.length"
    ),
    "whet.core": "types batch forest packing routes=expert_ids",
    "whet.diagnose": "agreement plan.plan plan.memory plan.layout plan.activations cli.doctor_checks=checks",
    "whet.engines": (
        "generators.base generators.config generators.hosted=remote generators.registry=config generators.router "
        "generators.sampling engines.speculative=config"
    ),
    "whet.engines.torch": (
        "models.decode_attention models.prefix generators.torch_config=config "
        "generators.torch_generator=generator generators.decoder generators.cached_model "
        "generators.engine_model generators.prefix_store=prefix_cache"
    ),
    "whet.engines.vllm": (
        "generators.vllm_adapter=adapter generators.vllm_config=config generators.vllm_generator=generator "
        "generators.vllm_guard=guard generators.vllm_model=model generators.vllm_processes=processes "
        "generators.vllm_speculative=config engines.vllm.speculative=config generators.vllm_worker=worker"
    ),
    "whet.losses": "losses.supervised=sft losses.divergences=distillation",
    "whet.models.attention": (
        "models.forest_attention=forest models.dense_attention=dense models.varlen_attention=varlen "
        "models.row_attention=row models.flex_attention=flex models.bins=layout models.attention_choice=choice "
        "models.state_forest=states"
    ),
    "whet.models.moe": "models.experts models.expert_lora models.routing",
    "whet.run": (
        "other_names machine run train recipe build feed evaluate serve run_folder=folder "
        "run_log=log stop_signals=signals"
    ),
    "whet.sandbox": (
        "processes.programs processes.sandbox processes.namespaces processes.confinement "
        "processes.remote_calls processes.linux=namespaces processes.numpy_part processes.values"
    ),
    "whet.tasks": (
        "environments.base environments.cases environments.hosted=isolated environments.single_turn=episodes "
        "environments.validate environments.traces environments.grading environments.problems "
        "environments.task_source environments.over=wrapped environments.prompts environments.registry=base "
        "environments.guessing=games environments.sliding_puzzle=games "
        "environments.long_context environments.program tasks.games.guessing=games tasks.games.sliding_puzzle=games "
        "tasks.long_context.task_set=long_context tasks.single_turn=episodes tasks.play=episodes tasks.few_shot=prompts"
    ),
    "whet.tasks.adapters": (
        "environments.reasoning_gym_adapter=reasoning_gym environments.openenv environments.verifiers_adapter=verifiers"
    ),
    "whet.tasks.choice": "environments.multiple_choice=task_set environments.choice_grader=grader",
    "whet.tasks.code": "environments.code=task_set environments.code_rows=rows environments.code_tests=tests",
    "whet.tasks.gym": "environments.gym_rows=rows gym.client gym.items gym.rows gym.tasks tasks.gym.training_rows=rows",
    "whet.tasks.instructions": "environments.instruction_following=task_set environments.instruction_checks=checks",
    "whet.tasks.judges": (
        "judges.comparison judges.environments=judge judges.genrm judges.genrm_training judges.judge "
        "judges.prompts judges.rubric tasks.judges.task_sets=judge"
    ),
    "whet.tasks.math": (
        "environments.arithmetic environments.gsm8k=dataset tasks.math.gsm8k=dataset environments.math_dataset=dataset "
        "environments.math_grader=grader environments.math_answers=answers "
        "environments.math_notation=notation environments.formulas environments.written_numbers"
    ),
    "whet.tasks.preference": "environments.reward_model environments.reward_model_process",
    "whet.tasks.structured": (
        "environments.structured_output=task_set environments.structured_grader=grader "
        "environments.structured_text=text environments.json_schema"
    ),
    "whet.tasks.tools": (
        "environments.tool_tasks=base environments.calculator environments.corpus_search "
        "environments.database environments.office environments.office_tools "
        "environments.tool_hallucination=hallucination environments.tool_calls_in_text=hallucination "
        "tasks.tools.calls_in_text=hallucination pipeline.hallucinating=hallucination"
    ),
    "whet.weights": "learner.named_weights",
}

MOVED = {
    f"whet.{old}": f"{package}.{new or old.rpartition('.')[2]}"
    for package, modules in _MOVED.items()
    for old, _, new in (module.partition("=") for module in modules.split())
}
