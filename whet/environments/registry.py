"""The built-in task sets: the name in a recipe, and the class it stands for."""

TASK_SETS = {
    "agent": "whet.environments.program:AgentTasks",
    "arithmetic": "whet.environments.arithmetic:Arithmetic",
    "calculator": "whet.environments.calculator:Calculator",
    "corpus_search": "whet.environments.corpus_search:CorpusSearch",
    "database": "whet.environments.database:Database",
    "gsm8k": "whet.environments.gsm8k:GSM8K",
    "guessing": "whet.environments.guessing:Guessing",
    "math": "whet.environments.math_dataset:Math",
    "instruction_following": "whet.environments.instruction_following:InstructionFollowing",
    "long_context": "whet.environments.long_context:LongContext",
    "multiple_choice": "whet.environments.multiple_choice:MultipleChoice",
    "sliding_puzzle": "whet.environments.sliding_puzzle:SlidingPuzzle",
    "structured_output": "whet.environments.structured_output:StructuredOutput",
    "blend": "whet.rollouts.blend:Blend",
    "judge": "whet.judges.rubric:Judged",
    "genrm": "whet.judges.genrm:GenRM",
    "genrm_training": "whet.judges.genrm_training:GenRMTraining",
    "reward_model": "whet.environments.reward_model:RewardModelTasks",
    "prompts": "whet.environments.prompts:Prompts",
    "reasoning_gym": "whet.environments.reasoning_gym_adapter:ReasoningGym",
}
