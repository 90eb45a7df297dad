"""The names of settings in other libraries (TRL, verl, NeMo RL, OpenRLHF) and the settings here that do the same. Used
only in messages about unknown keys."""

_BATCH = "rollouts.prompts_per_step (prompts, each with algorithm.group_size answers), or data.batch_size of rows"
_ACCUMULATION = (
    "learner.max_tokens: a step is split into micro-batches of that size, so gradient accumulation is not a setting"
)

OTHER_NAMES = {
    name: answer
    for answer, names in {
        "optimizer.lr": "learning_rate optim.lr kwargs.lr actor_learning_rate",
        "optimizer.warmup_steps": "warmup_ratio warmup_steps lr_warmup_steps lr_scheduler_type",
        "optimizer.max_grad_norm": "max_grad_norm grad_clip clip_grad",
        "algorithm.group_size": "num_generations rollout.n num_generations_per_prompt n_samples_per_prompt group_size",
        "sampling.temperature": "temperature",
        "sampling.top_p": "top_p",
        "sampling.top_k": "top_k",
        "sampling.max_new_tokens": "max_completion_length max_response_length max_new_tokens max_tokens "
        "generate_max_len",
        "sampling.max_prompt_tokens": "max_prompt_length max_input_seq_length prompt_max_len",
        _BATCH: "per_device_train_batch_size train_batch_size num_prompts_per_step rollout_batch_size batch_size "
        "generation_batch_size train_global_batch_size",
        _ACCUMULATION: "gradient_accumulation_steps micro_batch_size ppo_micro_batch_size_per_gpu "
        "train_micro_batch_size micro_train_batch_size ppo_max_token_len_per_gpu",
        "algorithm.loss.kl.coefficient": "beta kl_coef kl_loss_coef reference_policy_kl_penalty init_kl_coef "
        "use_kl_loss kl_penalty",
        "algorithm.loss.surrogate.clip_low and clip_high": "epsilon clip_ratio clip_ratio_low ratio_clip_min eps_clip",
        "algorithm.loss.surrogate.clip_high": "epsilon_high clip_ratio_high ratio_clip_max",
        "algorithm.loss.entropy_coefficient": "entropy_coeff entropy_coef",
        "algorithm.epochs and algorithm.minibatches": "num_iterations ppo_epochs ppo_mini_batch_size",
        "algorithm, as in algorithm=dr_grpo or algorithm=dapo": "loss_type adv_estimator advantage_estimator loss_fn",
        "algorithm.loss.correction, as in algorithm.loss.correction=tis": "vllm_importance_sampling_correction "
        "rollout_correction use_importance_sampling_correction enable_vllm_is_correction",
        "model.lora.rank": "lora_r lora_rank peft_config.r",
        "model.lora.alpha": "lora_alpha",
        "model.lora.dropout": "lora_dropout",
        "model.lora.target_modules": "lora_target_modules",
        "model.lora.quantize": "load_in_4bit use_qlora bnb_4bit_quant_type",
        "chat_template, the text or a file": "chat_template_path model.chat_template tokenizer.chat_template",
        "model.path": "model_name_or_path model_name pretrain model_path model.name actor_rollout_ref.model.path",
        "learner.precision": "bf16 fp16 torch_dtype mixed_precision",
        "learner.activation_checkpointing": "gradient_checkpointing enable_gradient_checkpointing",
        "generator, as in generator=vllm": "use_vllm rollout.name generation.backend vllm_num_engines",
        "devices.placement, as in devices.placement=colocated": "vllm_mode colocated colocated.enabled "
        "colocate_all_models hybrid_engine",
        "parallel, as in parallel.fsdp=2": "dtensor_cfg megatron_cfg fsdp_config deepspeed",
        "steps": "max_steps max_num_steps total_training_steps num_steps",
        "epochs": "num_train_epochs num_epochs total_epochs max_num_epochs max_epochs",
        "sinks, as in sinks=[console,jsonl,wandb]": "report_to trainer.logger logger wandb tensorboard "
        "mlflow trackio swanlab wandb_enabled use_wandb logging_dir log_with",
        "rewards, or the grade() of your task set in data": "reward_funcs reward_weights reward_fn reward "
        "custom_reward_function reward_model_path reward_function remote_rm_url",
        "data": "train_dataset dataset dataset_name train_files prompt_data env",
        "evaluation.every": "eval_steps test_freq val_period eval_every",
        "evaluation.patience": "earlystoppingcallback early_stopping_patience",
        "checkpoints.every": "save_steps save_freq save_period",
        "checkpoints.mirror, or whet export --push": "push_to_hub hub_strategy default_hdfs_dir",
        "rollouts.max_staleness": "async_training async_train max_trajectory_age_steps",
        "whet resume RUN": "resume_from_checkpoint resume_mode load_checkpoint",
        "whet train --folder": "output_dir default_local_dir checkpoint_dir save_path",
    }.items()
    for name in names.split()
}
"""The name there, alone or with its sections -> the setting here."""
_RUN_FOLDER = {"folder", "run_dir", "run_folder", "out", "out_dir", "output"}  # without a section


def here(key: str) -> str | None:
    """Return the setting here that corresponds to a key of another library, by the key's last parts."""
    parts = key.lower().replace("-", "_").split(".")
    if parts[0] in _RUN_FOLDER:
        return OTHER_NAMES["output_dir"]
    return next((OTHER_NAMES[name] for n in (3, 2, 1) if (name := ".".join(parts[-n:])) in OTHER_NAMES), None)
