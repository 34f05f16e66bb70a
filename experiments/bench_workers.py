"""One serving system in a process of its own, driven by `bench_engine.py` over stdin and stdout.

Only the standard library is imported here, so that any system's interpreter can run it:
`python bench_workers.py NAME`. The first line in is the configuration, each later one a workload;
every answer is one line of JSON. What libraries print goes to the error stream.

A system is a function that loads the model and returns `serve(requests, arrivals)`, which gives for
each request (its tokens, seconds to its first token, seconds to its last token), both counted from
its arrival. `arrivals` is None where all requests are there at the start.
"""

import json
import os
import sys
import time


def paxattn(config):
    from paxattn import LLM, SamplingParams

    llm = LLM(
        config["model"],
        dtype=config["dtype"],
        max_num_seqs=config["max_num_seqs"],
        max_model_len=config["max_model_len"],
        cache=config.get("cache", "paged"),
    )

    def serve(requests, arrivals):
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in requests]
        left = list(range(len(requests)))
        arrived, first, last, tokens, number = {}, {}, {}, {}, {}
        start = time.perf_counter()
        while left or llm.has_unfinished_requests():
            now = time.perf_counter() - start
            while left and (arrivals is None or arrivals[left[0]] <= now):
                i = left.pop(0)
                arrived[i] = start + (arrivals[i] if arrivals else 0.0)
                number[llm.add_request(requests[i][0], params[i])] = i
            if not llm.has_unfinished_requests():
                time.sleep(max(0.0, arrivals[left[0]] - now))
                continue
            # Nobody looks at single tokens here; short runs only while someone may yet arrive.
            for output in llm.step(stream=bool(left)):
                i = number[output.request_id]
                tokens[i] = output.outputs[0].token_ids
                first.setdefault(i, time.perf_counter())
                last[i] = time.perf_counter()
        return [
            (tokens[i], first[i] - arrived[i], last[i] - arrived[i]) for i in range(len(requests))
        ]

    serve.facts = lambda: {
        "compiled_programs": llm.stats()["compiled_programs"],
        "pool_bytes": llm.stats()["kv_cache_bytes"],
        "weight_bytes": sum(x.nbytes for x in _leaves(llm.params)),
    }
    return serve


def _leaves(params):
    import jax

    return jax.tree.leaves(params)


def _hf_model(config):
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(config["threads"])
    dtype = getattr(torch, config["dtype"])
    model = transformers.AutoModelForCausalLM.from_pretrained(config["hf_model"], dtype=dtype)
    return torch, model.eval()


def transformers_static(config):
    torch, model = _hf_model(config)
    from transformers import StoppingCriteria, StoppingCriteriaList

    class Clock(StoppingCriteria):
        def __init__(self):
            self.at = []

        def __call__(self, ids, scores, **_):
            self.at.append(time.perf_counter())
            return torch.zeros(ids.shape[0], dtype=torch.bool)

    def batch(requests):
        longest = max(len(p) for p, _ in requests)
        ids = torch.zeros(len(requests), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, (prompt, _) in enumerate(requests):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        clock = Clock()
        steps = max(n for _, n in requests)
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=steps,
                min_new_tokens=steps,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([clock]),
            )
        return out[:, longest:].tolist(), clock.at

    def serve(requests, arrivals):
        results, done = [None] * len(requests), 0
        start = time.perf_counter()
        while done < len(requests):  # a batch of those that are there, in order
            now = time.perf_counter() - start
            if arrivals is not None and arrivals[done] > now:
                time.sleep(arrivals[done] - now)
                continue
            end = done
            while end < len(requests) and end - done < config["max_num_seqs"]:
                if arrivals is not None and arrivals[end] > now:
                    break
                end += 1
            tokens, at = batch(requests[done:end])
            for i in range(done, end):
                came = start + (arrivals[i] if arrivals else 0.0)
                n = requests[i][1]
                results[i] = (tokens[i - done][:n], at[0] - came, at[n - 1] - came)
            done = end
        return results

    return serve


def transformers_continuous(config):
    _, model = _hf_model(config)
    from transformers import ContinuousBatchingConfig, GenerationConfig

    page = 32
    blocks = config["max_num_seqs"] * -(-config["max_model_len"] // page)
    options = ContinuousBatchingConfig(
        page_size=page,
        num_blocks=blocks,
        max_batch_tokens=512,
        max_requests_per_batch=config["max_num_seqs"],
        allow_block_sharing=False,
    )
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)

    def serve(requests, arrivals):
        results = [None] * len(requests)
        with model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=options, block=True
        ) as manager:
            start, sent = time.perf_counter(), 0
            while None in results:
                now = time.perf_counter() - start
                while sent < len(requests) and (arrivals is None or arrivals[sent] <= now):
                    prompt, n = requests[sent]
                    manager.add_request(prompt, str(sent), max_new_tokens=n, record_timestamps=True)
                    sent += 1
                wait = 0.2 if sent == len(requests) else max(0.001, arrivals[sent] - now)
                output = manager.get_result(timeout=wait)
                if output is None or not output.is_finished():
                    continue
                i = int(output.request_id)
                came = start + (arrivals[i] if arrivals else 0.0)
                tokens = list(output.generated_tokens)
                results[i] = (tokens, output.timestamps[0] - came, output.timestamps[-1] - came)
        return results

    return serve


def vllm(config):
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{config['threads'] - 1}")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM, SamplingParams

    llm = LLM(
        config["hf_model"],
        dtype=config["dtype"],
        max_num_seqs=config["max_num_seqs"],
        max_model_len=config["max_model_len"],
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )
    engine = llm.llm_engine

    def serve(requests, arrivals):
        results, first = [None] * len(requests), {}
        start, sent = time.perf_counter(), 0
        while None in results:
            now = time.perf_counter() - start
            while sent < len(requests) and (arrivals is None or arrivals[sent] <= now):
                prompt, n = requests[sent]
                params = SamplingParams(
                    temperature=0, max_tokens=n, ignore_eos=True, detokenize=False
                )
                engine.add_request(str(sent), {"prompt_token_ids": prompt}, params)
                sent += 1
            if not engine.has_unfinished_requests():
                time.sleep(max(0.0, arrivals[sent] - now))
                continue
            for output in engine.step():
                i, at = int(output.request_id), time.perf_counter() - start
                at -= arrivals[i] if arrivals else 0.0
                first.setdefault(i, at)
                if output.finished:
                    results[i] = (list(output.outputs[0].token_ids), first[i], at)
        return results

    return serve


SYSTEMS = {
    "paxattn": paxattn,
    "transformers_static": transformers_static,
    "transformers_continuous": transformers_continuous,
    "vllm": vllm,
}


def peak_bytes():
    """Most resident memory since `forget_peak`; None where the system does not tell."""
    try:
        with open("/proc/self/status", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def forget_peak():
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        pass


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to the standard output

    def answer(value):
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    started = time.perf_counter()
    config = json.loads(sys.stdin.readline())
    serve = SYSTEMS[sys.argv[1]](config)
    loaded = time.perf_counter() - started
    serve([(config["first"], 1)], None)
    answer({"load_s": loaded, "first_token_s": time.perf_counter() - started})
    for line in sys.stdin:
        work = json.loads(line)
        forget_peak()
        began = time.perf_counter()
        results = serve(work["requests"], work["arrivals"])
        answer(
            {
                "seconds": time.perf_counter() - began,
                "results": results,
                "peak_bytes": peak_bytes(),
                "facts": getattr(serve, "facts", dict)(),
            }
        )


if __name__ == "__main__":
    main()
