"""What a drafter guesses while a decoder runs, noted beside the text that it guesses behind; and what that changes."""

from yggdrasil import SamplingParams


def watch(decoder):
    """Every tree that the drafter grows from now on: (text, [(path, log-probability of its last token)])."""
    drafter, seen, text = decoder.assembly.engine.drafter, [], []
    begin, extend, propose = drafter.begin, drafter.extend, drafter.propose

    def noting_begin(tokens):
        text[:] = tokens
        begin(tokens)

    def noting_extend(tokens, states):
        text.extend(tokens)
        extend(tokens, states)

    def noting_propose(tree, budget):
        propose(tree, budget)
        nodes, paths = range(1, 1 + budget.width * budget.depth), {0: []}
        for node in nodes:
            paths[node] = [*paths[int(tree.parents[node])], int(tree.tokens[node])]
        seen.append((list(text), [(paths[node], float(tree.edges[node])) for node in nodes]))

    drafter.begin, drafter.extend, drafter.propose = noting_begin, noting_extend, noting_propose
    return seen


def assert_guesses(seen, expected_edge):
    """Every guess has the log-probability that ``expected_edge(text, path)`` says."""
    for text, guesses in seen:
        for path, edge in guesses:
            assert abs(edge - float(expected_edge(text, path))) < 2e-3, (text, path)


def assert_sampled_alike(decoder, alone, prompt, count, *, temperature, seed):
    """With a seed ``decoder`` samples what the target of ``alone`` samples by itself."""
    sampling = SamplingParams(temperature=temperature, seed=seed)
    ours = decoder.generate(prompt, max_new_tokens=count, sampling=sampling)
    theirs = alone.generate(prompt, max_new_tokens=count, sampling=sampling, speculation=False)

    assert ours.tokens == theirs.tokens
