CREATE TABLE IF NOT EXISTS session_facts (
    session String,
    task SimpleAggregateFunction(max, String),
    run SimpleAggregateFunction(max, String),
    idx SimpleAggregateFunction(max, UInt64),
    harness SimpleAggregateFunction(max, String),
    harness_version SimpleAggregateFunction(max, String),
    runtime SimpleAggregateFunction(max, String),
    isolation SimpleAggregateFunction(max, String),
    work_class SimpleAggregateFunction(max, String),
    model SimpleAggregateFunction(max, String),
    gateway SimpleAggregateFunction(max, String),
    attempts SimpleAggregateFunction(max, UInt64),
    accepted SimpleAggregateFunction(max, DateTime64(6, 'UTC')),
    queued SimpleAggregateFunction(max, DateTime64(6, 'UTC')),
    claimed SimpleAggregateFunction(max, DateTime64(6, 'UTC')),
    initialized SimpleAggregateFunction(max, DateTime64(6, 'UTC')),
    running SimpleAggregateFunction(max, DateTime64(6, 'UTC')),
    sealed SimpleAggregateFunction(max, DateTime64(6, 'UTC')),
    exited SimpleAggregateFunction(max, DateTime64(6, 'UTC')),
    artifacts SimpleAggregateFunction(max, DateTime64(6, 'UTC')),
    reconstructed SimpleAggregateFunction(max, DateTime64(6, 'UTC')),
    evaluated SimpleAggregateFunction(max, DateTime64(6, 'UTC')),
    ended SimpleAggregateFunction(max, DateTime64(6, 'UTC')),
    state SimpleAggregateFunction(max, String),
    outcome SimpleAggregateFunction(max, String),
    reward SimpleAggregateFunction(max, Nullable(Float64)),
    has_reward SimpleAggregateFunction(max, UInt8),
    exit_code SimpleAggregateFunction(max, Nullable(Int64)),
    timed_out SimpleAggregateFunction(max, UInt8),
    fault SimpleAggregateFunction(max, String),
    cause SimpleAggregateFunction(max, String),
    run_s SimpleAggregateFunction(max, Float64),
    init_s SimpleAggregateFunction(max, Float64),
    ready_s SimpleAggregateFunction(max, Float64),
    postrun_s SimpleAggregateFunction(max, Float64),
    eval_s SimpleAggregateFunction(max, Float64),
    peak_rss_mb SimpleAggregateFunction(max, Float64),
    traces SimpleAggregateFunction(max, UInt64),
    trained_completions SimpleAggregateFunction(max, UInt64),
    excluded SimpleAggregateFunction(max, UInt64),
    sampled_tokens SimpleAggregateFunction(max, UInt64),
    exact_spans SimpleAggregateFunction(max, UInt64),
    drifted_spans SimpleAggregateFunction(max, UInt64)
) ENGINE = AggregatingMergeTree()
ORDER BY (session);

CREATE TABLE IF NOT EXISTS completions (
    session String,
    attempt UInt64,
    completion String,
    kind LowCardinality(String),
    seq UInt64,
    time DateTime64(6, 'UTC'),
    task String,
    run LowCardinality(String),
    dialect LowCardinality(String),
    stream UInt8,
    model LowCardinality(String),
    prompt_tokens UInt64,
    sampled_tokens UInt64,
    cached_tokens UInt64,
    finish LowCardinality(String),
    untrainable LowCardinality(String),
    reason LowCardinality(String),
    chain_class LowCardinality(String),
    parent String,
    parent_by LowCardinality(String),
    ambiguous UInt8,
    context LowCardinality(String),
    context_exact UInt8,
    context_faithful UInt8,
    additions Array(String),
    policy_seq UInt64,
    version LowCardinality(String),
    version_spans UInt64,
    temperature Float64,
    engine LowCardinality(String),
    replica LowCardinality(String),
    agent String,
    dropped Array(String),
    ttft_s Float64,
    duration_s Float64
) ENGINE = ReplacingMergeTree(seq)
ORDER BY (session, completion, kind);

CREATE TABLE IF NOT EXISTS attempts (
    session String,
    attempt UInt64,
    task SimpleAggregateFunction(max, String),
    run SimpleAggregateFunction(max, String),
    gateway SimpleAggregateFunction(max, String),
    claimed SimpleAggregateFunction(max, DateTime64(6, 'UTC')),
    ended SimpleAggregateFunction(max, DateTime64(6, 'UTC')),
    end SimpleAggregateFunction(max, String),
    exit_code SimpleAggregateFunction(max, Nullable(Int64)),
    fault SimpleAggregateFunction(max, String),
    cause SimpleAggregateFunction(max, String),
    detail SimpleAggregateFunction(max, String),
    run_s SimpleAggregateFunction(max, Float64)
) ENGINE = AggregatingMergeTree()
ORDER BY (session, attempt);

CREATE TABLE IF NOT EXISTS evaluations (
    session String,
    attempt UInt64,
    evaluation LowCardinality(String),
    seq UInt64,
    time DateTime64(6, 'UTC'),
    task String,
    run LowCardinality(String),
    evaluator LowCardinality(String),
    outcome LowCardinality(String),
    reward Nullable(Float64),
    detail String,
    eval_s Float64
) ENGINE = ReplacingMergeTree(seq)
ORDER BY (session, evaluation);

CREATE TABLE IF NOT EXISTS builds (
    build LowCardinality(String),
    session String,
    seq UInt64,
    time DateTime64(6, 'UTC'),
    task String,
    run LowCardinality(String),
    rules LowCardinality(String),
    rules_hash LowCardinality(String),
    ok UInt8,
    reason String,
    traces UInt64,
    trained_completions UInt64,
    sampled_tokens UInt64,
    exact_spans UInt64,
    drifted_spans UInt64,
    ambiguous UInt64,
    excluded Map(String, String)
) ENGINE = ReplacingMergeTree(seq)
ORDER BY (build, session);

CREATE TABLE IF NOT EXISTS traces (
    trace String,
    run LowCardinality(String),
    build LowCardinality(String),
    task String,
    session String,
    number UInt64,
    seq UInt64,
    time DateTime64(6, 'UTC'),
    rules LowCardinality(String),
    status LowCardinality(String),
    chain_class LowCardinality(String),
    prompt_tokens UInt64,
    response_tokens UInt64,
    action_tokens UInt64,
    spans UInt64,
    exact_spans UInt64,
    drift Array(String),
    policy_seq_min UInt64,
    policy_seq_max UInt64
) ENGINE = ReplacingMergeTree(seq)
ORDER BY (build, session, number);

CREATE TABLE IF NOT EXISTS group_members (
    task String,
    run LowCardinality(String),
    session String,
    seq UInt64,
    time DateTime64(6, 'UTC'),
    closed_by LowCardinality(String),
    outcome LowCardinality(String),
    reward Nullable(Float64),
    has_reward UInt8,
    trainable UInt8,
    reason LowCardinality(String),
    attempts UInt64
) ENGINE = ReplacingMergeTree(seq)
ORDER BY (task, session);

CREATE TABLE IF NOT EXISTS policies (
    version String,
    policy_seq UInt64,
    replica String,
    kind LowCardinality(String),
    seq UInt64,
    time DateTime64(6, 'UTC'),
    trainer LowCardinality(String),
    update_s Float64
) ENGINE = ReplacingMergeTree(seq)
ORDER BY (version, kind, replica);

CREATE TABLE IF NOT EXISTS consumed (
    trainer LowCardinality(String),
    epoch UInt64,
    step UInt64,
    trace String,
    session String,
    build LowCardinality(String),
    seq UInt64,
    time DateTime64(6, 'UTC'),
    policy_seq UInt64,
    trace_policy_seq UInt64
) ENGINE = ReplacingMergeTree(seq)
ORDER BY (trainer, epoch, step, trace);

CREATE TABLE IF NOT EXISTS trace_messages (
    stream LowCardinality(String),
    seq UInt64,
    subject String,
    time DateTime64(6, 'UTC')
) ENGINE = ReplacingMergeTree()
ORDER BY (stream, seq);

CREATE TABLE IF NOT EXISTS events (
    stream LowCardinality(String),
    seq UInt64,
    time DateTime64(6, 'UTC'),
    subject String,
    kind LowCardinality(String),
    run LowCardinality(String),
    task String,
    session String,
    attempt UInt64,
    event_id String,
    producer LowCardinality(String),
    bytes UInt64,
    body String CODEC(ZSTD(3))
) ENGINE = ReplacingMergeTree()
ORDER BY (stream, seq);

CREATE OR REPLACE VIEW sessions AS
SELECT
    f.session AS session,
    multiIf(max(f.state) != '', max(f.state), toYear(max(f.exited)) > 1970, 'exited',
            toYear(max(f.running)) > 1970, 'running', toYear(max(f.claimed)) > 1970, 'claimed',
            toYear(max(f.queued)) > 1970, 'queued', 'accepted') AS state,
    max(f.task) AS task,
    max(f.run) AS run,
    max(f.idx) AS idx,
    max(f.harness) AS harness,
    max(f.harness_version) AS harness_version,
    max(f.runtime) AS runtime,
    max(f.isolation) AS isolation,
    max(f.work_class) AS work_class,
    max(f.model) AS model,
    max(f.gateway) AS gateway,
    max(f.attempts) AS attempts,
    max(f.accepted) AS accepted,
    max(f.queued) AS queued,
    max(f.claimed) AS claimed,
    max(f.initialized) AS initialized,
    max(f.running) AS running,
    max(f.sealed) AS sealed,
    max(f.exited) AS exited,
    max(f.artifacts) AS artifacts,
    max(f.reconstructed) AS reconstructed,
    max(f.evaluated) AS evaluated,
    max(f.ended) AS ended,
    max(f.outcome) AS outcome,
    max(f.reward) AS reward,
    max(f.has_reward) AS has_reward,
    max(f.exit_code) AS exit_code,
    max(f.timed_out) AS timed_out,
    max(f.fault) AS fault,
    max(f.cause) AS cause,
    max(f.run_s) AS run_s,
    max(f.init_s) AS init_s,
    max(f.ready_s) AS ready_s,
    max(f.postrun_s) AS postrun_s,
    max(f.eval_s) AS eval_s,
    max(f.peak_rss_mb) AS peak_rss_mb,
    max(f.traces) AS traces,
    max(f.trained_completions) AS trained_completions,
    max(f.excluded) AS excluded,
    max(f.sampled_tokens) AS sampled_tokens,
    max(f.exact_spans) AS exact_spans,
    max(f.drifted_spans) AS drifted_spans
FROM session_facts AS f
GROUP BY f.session;

CREATE OR REPLACE VIEW policy_age AS
SELECT
    c.session AS session, c.completion AS completion, c.run AS run, c.task AS task, c.time AS time,
    c.policy_seq AS policy_seq, c.version AS version, c.sampled_tokens AS sampled_tokens,
    greatest(p.policy_seq, c.policy_seq) - c.policy_seq AS age
FROM (SELECT * FROM completions FINAL WHERE kind = 'captured') AS c
ASOF LEFT JOIN (
    SELECT 1 AS one, time, max(policy_seq) OVER (ORDER BY time) AS policy_seq
    FROM policies FINAL WHERE kind = 'published'
) AS p ON p.one = toUInt8(c.seq > 0) AND p.time <= c.time;

CREATE OR REPLACE VIEW policy_age_consumed AS
SELECT trainer, epoch, step, trace, session, build, policy_seq, trace_policy_seq, time,
       greatest(policy_seq, trace_policy_seq) - trace_policy_seq AS age
FROM consumed FINAL;

CREATE OR REPLACE VIEW session_length AS
SELECT
    s.session AS session, s.run AS run, s.task AS task, s.harness AS harness, s.outcome AS outcome, s.reward AS reward,
    c.calls AS completions, c.aborted AS aborted, c.sampled AS sampled_tokens, c.longest AS longest_prompt,
    s.traces AS traces, s.run_s AS run_s, dateDiff('millisecond', s.accepted, s.ended) / 1000 AS total_s
FROM sessions AS s
LEFT JOIN (
    SELECT session, countIf(kind = 'captured') AS calls, countIf(kind = 'aborted') AS aborted,
           sumIf(sampled_tokens, kind = 'captured') AS sampled, max(prompt_tokens) AS longest
    FROM completions FINAL GROUP BY session
) AS c ON c.session = s.session;

CREATE OR REPLACE VIEW reward_distribution AS
SELECT
    run, harness, task, count() AS sessions, countIf(has_reward = 1) AS rewarded,
    avgIf(reward, has_reward = 1) AS mean_reward, stddevPopIf(reward, has_reward = 1) AS spread,
    countIf(outcome = 'passed') / count() AS pass_share,
    groupArrayIf(reward, has_reward = 1) AS rewards
FROM sessions WHERE state IN ('completed', 'failed', 'cancelled')
GROUP BY run, harness, task;

CREATE OR REPLACE VIEW outcomes AS
SELECT run, harness, outcome, count() AS sessions, sum(attempts) AS attempts, avg(run_s) AS mean_run_s
FROM sessions WHERE outcome != ''
GROUP BY run, harness, outcome;
