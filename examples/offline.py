"""SGLang's offline engine with the extension: no server.

.venv/bin/python examples/offline.py
"""

import sglang as sgl

from sgl_ext.models import SMOLLM2, prepare

if __name__ == "__main__":  # the engine spawns processes, which import this file again
    engine = sgl.Engine(
        model_path=str(prepare(SMOLLM2)),
        max_total_tokens=8192,
        enable_ext=True,
        ext_config={"start_deadline": "10min"},
    )
    try:
        prompts = ["The capital of France is", "Water is made of hydrogen and"]
        for prompt, output in zip(
            prompts,
            engine.generate(prompts, {"temperature": 0, "max_new_tokens": 8}),
            strict=True,
        ):
            print(prompt + output["text"])
        print("active:", engine.get_server_info()["sgl_ext"]["version"])
    finally:
        engine.shutdown()
