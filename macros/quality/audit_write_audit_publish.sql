{#-
    Audit-Write-Audit-Publish: what readers see has passed its audits, or says which it has not.

    The model's rows are written to a staging table, audited there in one scan, and published in one Delta
    commit. The staging table is a managed one in a schema of its own, `<schema>__staging`, whose folder lies beside
    the model's `location_root`, on storage that every executor reaches: readers have no business there, no model
    refers to it, and dropping it drops its files, also those that a killed run left.

    Order of the writes: rejected rows, audit results, published rows. Each replaces what it wrote for the same
    periods before, so a run that dies between two of them is repaired by the next one; and an issue is on
    record before anybody can read the rows that have it.
-#}

{% materialization awap, adapter='spark', supported_languages=['sql'] %}
    {%- set options = lakehouse_patterns._awap_options() -%}
    {%- set existing_relation = load_relation(this) -%}
    {%- set staging = api.Relation.create(
        schema=this.schema ~ '__staging', identifier=this.identifier, type='table'
    ) -%}

    {%- do lakehouse_patterns._awap_audit_inputs(options.input_audits) -%}
    {{ run_hooks(pre_hooks) }}

    {%- do lakehouse_patterns._awap_stage(staging, compiled_code) -%}
    {%- set scope = lakehouse_patterns._awap_scope(options, staging, existing_relation) -%}
    {%- set findings = lakehouse_patterns._awap_findings(
        options, scope, lakehouse_patterns._awap_measure(options, scope)
    ) -%}
    {%- if findings.fail -%}
        {%- do adapter.drop_relation(staging) -%}
        {%- do exceptions.raise_compiler_error(
            'lakehouse_patterns: nothing was published to ' ~ this ~ '. ' ~ (findings.messages | join('. '))
        ) -%}
    {%- endif -%}

    {%- do lakehouse_patterns._awap_write_rejects(options, scope, findings) -%}
    {%- do lakehouse_patterns._awap_write_results(options, scope, findings) -%}
    {%- do lakehouse_patterns._awap_require_own_staging(staging) -%}
    {%- set replaced = lakehouse_patterns._awap_publish(options, scope, findings) -%}
    {%- do adapter.drop_relation(staging) -%}

    {%- do apply_grants(this, config.get('grants'), should_revoke(existing_relation, replaced)) -%}
    {%- do persist_docs(this, model) -%}
    {{ run_hooks(post_hooks) }}

    {%- if findings.error -%}
        {%- do exceptions.raise_compiler_error(
            'lakehouse_patterns: what passed was published to ' ~ this ~ ', but an audit of severity error has an issue. '
            ~ (findings.messages | join('. '))
        ) -%}
    {%- elif findings.messages -%}
        {%- do exceptions.warn(this ~ ': ' ~ (findings.messages | join('. '))) -%}
    {%- endif -%}

    {{ return({'relations': [this]}) }}
{% endmaterialization %}


{#- Options ------------------------------------------------------------------------------------------------- -#}

{% macro _awap_options() %}
    {%- set given = lakehouse_patterns.options('awap') or {} -%}
    {%- do lakehouse_patterns.require(
        config.get('file_format') == 'delta',
        "materialized='awap' needs file_format='delta', got '" ~ config.get('file_format') ~ "'"
    ) -%}
    {%- do lakehouse_patterns.require_known_keys(
        'awap', given, ['audits', 'input_audits', 'period', 'is_deleted', 'from', 'to', 'history']
    ) -%}
    {%- do lakehouse_patterns.require(given.get('audits'), 'awap needs audits, a list of at least one') -%}
    {%- do lakehouse_patterns.require(
        ('from' in given) == ('to' in given) and ('from' not in given or 'period' in given),
        'awap takes from and to together, and with a period column'
    ) -%}
    {%- do lakehouse_patterns.require(
        'is_deleted' not in given or ('period' in given and 'from' not in given),
        'awap takes is_deleted with a period column and without from and to, which say already what is gone'
    ) -%}
    {%- set audits = [] -%}
    {%- for audit in given.audits -%}
        {%- set audit = lakehouse_patterns._awap_audit(audit) -%}
        {%- do lakehouse_patterns.require(
            audit.name not in audits | map(attribute='name'), "awap has two audits named '" ~ audit.name ~ "'"
        ) -%}
        {%- do audits.append(audit) -%}
    {%- endfor -%}
    {{ return({
        'audits': audits,
        'input_audits': given.get('input_audits', []),
        'period': given.get('period'),
        'is_deleted': given.get('is_deleted'),
        'from': given.get('from'),
        'to': given.get('to'),
        'history': given.get('history', 7),
        'dispatches': 'dispatch' in audits | map(attribute='outcome'),
    }) }}
{% endmacro %}


{% macro _awap_audit(given) %}
    {#- One audit, checked and completed: what it measures (`value`, in SQL) and what is allowed (`min`, `max`). -#}
    {%- set keys = {
        'row_count': ['min', 'max'],
        'null_share': ['column', 'max'],
        'record': ['valid_when', 'max_invalid_share'],
        'measure': ['expression', 'min', 'max'],
        'change': ['expression', 'min', 'max'],
    } -%}
    {%- do lakehouse_patterns.require(given.get('name'), 'each audit of awap needs a name, got ' ~ given) -%}
    {%- set what = "audit '" ~ given.name ~ "'" -%}
    {%- do lakehouse_patterns.require_one_of('type of ' ~ what, given.get('type'), keys.keys() | list) -%}
    {%- do lakehouse_patterns.require_known_keys(
        what, given, ['name', 'type', 'outcome', 'severity'] + keys[given.type]
    ) -%}
    {%- for key in keys[given.type] if key in ('column', 'valid_when', 'expression') -%}
        {%- do lakehouse_patterns.require(given.get(key), what ~ ' of type ' ~ given.type ~ ' needs ' ~ key) -%}
    {%- endfor -%}

    {%- set outcome = given.get('outcome', 'fail') -%}
    {%- do lakehouse_patterns.require_one_of('outcome of ' ~ what, outcome, ['fail', 'dispatch', 'annotate']) -%}
    {%- set severity = given.get('severity', 'error' if outcome == 'fail' else 'warn') -%}
    {%- do lakehouse_patterns.require_one_of('severity of ' ~ what, severity, ['error', 'warn']) -%}
    {%- do lakehouse_patterns.require(
        severity == 'error' or outcome != 'fail',
        what ~ ' publishes nothing (outcome fail), so its severity is error, got warn; '
        ~ 'outcome annotate publishes and warns'
    ) -%}

    {%- if given.type == 'record' -%}
        {%- do lakehouse_patterns.require(
            outcome != 'dispatch' or 'max_invalid_share' in given,
            what ~ ' dispatches invalid rows and needs max_invalid_share, above which all rows are rejected'
        ) -%}
        {%- set value, lowest, highest = (
            'count_if((' ~ given.valid_when ~ ') is not true)', none, given.get('max_invalid_share', 0)
        ) -%}
    {%- elif given.type == 'null_share' -%}
        {%- set value, lowest, highest = 'count_if(' ~ given.column ~ ' is null)', none, given.get('max') -%}
    {%- elif given.type == 'row_count' -%}
        {%- set value, lowest, highest = 'count(*)', given.get('min'), given.get('max') -%}
    {%- else -%}
        {%- set value, lowest, highest = given.expression, given.get('min'), given.get('max') -%}
    {%- endif -%}
    {%- do lakehouse_patterns.require(
        lowest is not none or highest is not none, what ~ ' needs a bound: min, max or both'
    ) -%}
    {{ return({
        'name': given.name,
        'type': given.type,
        'column': given.get('column'),
        'valid_when': given.get('valid_when'),
        'value': value,
        'min': lowest,
        'max': highest,
        'outcome': outcome,
        'severity': severity,
    }) }}
{% endmacro %}


{#- Audit 1: the input, from metadata ------------------------------------------------------------------------ -#}

{% macro _awap_audit_inputs(input_audits) %}
    {%- set problems, inputs = [], {} -%}
    {%- for id in model.depends_on.nodes -%}
        {%- set node = graph.nodes.get(id) or graph.sources.get(id) -%}
        {%- do inputs.update({node.name: node}) -%}
    {%- endfor -%}
    {%- for audit in input_audits -%}
        {%- do lakehouse_patterns.require_known_keys(
            'input audit', audit, ['input', 'min_rows', 'min_bytes', 'columns']
        ) -%}
        {%- do lakehouse_patterns.require_one_of('input of an input audit', audit.get('input'), inputs.keys() | list) -%}
        {%- set node = inputs[audit.input] -%}
        {%- set relation = adapter.get_relation(none, node.schema, node.alias or node.identifier) -%}
        {%- if relation is none -%}
            {%- do problems.append(audit.input ~ ' does not exist') -%}
        {%- else -%}
            {%- do problems.extend(lakehouse_patterns._awap_input_problems(audit, relation)) -%}
        {%- endif -%}
    {%- endfor -%}
    {%- if problems -%}
        {%- do exceptions.raise_compiler_error(
            'lakehouse_patterns: ' ~ this ~ ' was not built, its input failed ' ~ (problems | length)
            ~ ' audits. ' ~ (problems | join('. '))
        ) -%}
    {%- endif -%}
{% endmacro %}


{% macro _awap_input_problems(audit, relation) %}
    {%- set problems = [] -%}
    {%- if 'min_bytes' in audit -%}
        {%- set detail = run_query('describe detail ' ~ relation).rows[0] -%}
        {%- if detail['sizeInBytes'] < audit.min_bytes -%}
            {%- do problems.append(
                audit.input ~ ' has ' ~ detail['sizeInBytes'] ~ ' bytes, allowed at least ' ~ audit.min_bytes
            ) -%}
        {%- endif -%}
    {%- endif -%}
    {%- if 'min_rows' in audit -%}
        {#- Delta answers a bare count from its log. -#}
        {%- set row_count = run_query('select count(*) from ' ~ relation).rows[0][0] -%}
        {%- if row_count < audit.min_rows -%}
            {%- do problems.append(
                audit.input ~ ' has ' ~ row_count ~ ' rows, allowed at least ' ~ audit.min_rows
            ) -%}
        {%- endif -%}
    {%- endif -%}
    {%- set present = adapter.get_columns_in_relation(relation) | map(attribute='name') | list -%}
    {%- set absent = audit.get('columns', []) | reject('in', present) | list -%}
    {%- if absent -%}
        {%- do problems.append(audit.input ~ ' lacks the columns ' ~ (absent | join(', '))) -%}
    {%- endif -%}
    {{ return(problems) }}
{% endmacro %}


{#- Write: the staging table ---------------------------------------------------------------------------------- -#}

{% macro _awap_stage(staging, compiled_code) %}
    {#- Statistics would be collected for a table that is read once, whole. -#}
    {%- set root = config.get('location_root') -%}
    {%- do run_query(
        'create schema if not exists ' ~ staging.schema ~ (" location '" ~ root ~ "__staging'" if root else '')
    ) -%}
    {%- call statement('stage') -%}
        create or replace table {{ staging }}
        using delta
        tblproperties (
            'delta.dataSkippingNumIndexedCols' = '0',
            'lakehouse_patterns.staged_by' = '{{ invocation_id }}'
        )
        as
        {{ compiled_code }}
    {%- endcall -%}
{% endmacro %}


{% macro _awap_require_own_staging(staging) %}
    {#- Two runs of one model at once share the staging table; what is published must be what was audited. -#}
    {%- set staged_by = run_query(
        'show tblproperties ' ~ staging ~ " ('lakehouse_patterns.staged_by')"
    ).rows[0][1] -%}
    {%- do lakehouse_patterns.require(
        staged_by == invocation_id,
        'nothing was published from ' ~ staging ~ ': another run of the model staged its rows meanwhile'
    ) -%}
{% endmacro %}


{% macro _awap_scope(options, staging, existing_relation) %}
    {#-
        What this run replaces. `rows` are the staged rows that are audited and published, in SQL; `interval` is the
        SQL condition of `[from, to)`, if given; `target` is the published table when only some of its periods are
        replaced, else none.
    -#}
    {%- set columns = adapter.get_columns_in_relation(staging) -%}
    {%- set rebuilds = existing_relation is none or should_full_refresh() or not existing_relation.is_delta -%}
    {%- set scope = {
        'staging': staging,
        'rows': staging,
        'columns': columns,
        'existing': existing_relation,
        'target': none if rebuilds or not options.period else existing_relation,
        'run': run_started_at.strftime('%Y-%m-%d'),
        'interval': none,
    } -%}
    {%- do scope.update({'results': lakehouse_patterns._awap_companion('__audit_results')}) -%}
    {%- if options.dispatches -%}
        {%- do scope.update({'rejects': lakehouse_patterns._awap_companion('__rejects')}) -%}
    {%- endif -%}
    {%- if options.period -%}
        {%- set types = {} -%}
        {%- for column in columns -%}
            {%- do types.update({column.name | lower: column.dtype}) -%}
        {%- endfor -%}
        {%- do lakehouse_patterns.require(
            options.period | lower in types,
            "period '" ~ options.period ~ "' is no column of the model; it has " ~ (types.keys() | join(', '))
        ) -%}
        {%- do scope.update({'period': adapter.quote(options.period), 'type': types[options.period | lower]}) -%}
    {%- endif -%}
    {%- if options.is_deleted -%}
        {%- do lakehouse_patterns.require(
            types.get(options.is_deleted | lower) == 'boolean',
            "is_deleted must be a boolean column of the model, '" ~ options.is_deleted ~ "' is "
            ~ types.get(options.is_deleted | lower, 'none of its columns')
        ) -%}
        {%- do scope.update({
            'rows': '(select * from ' ~ staging ~ ' where ' ~ adapter.quote(options.is_deleted) ~ ' is not true)'
        }) -%}
    {%- endif -%}
    {%- if options.from -%}
        {%- set bounds = run_query(
            'select try_cast(try_cast(' ~ options.from ~ ' as ' ~ scope.type ~ ') as string) as lower_bound, '
            ~ 'try_cast(try_cast(' ~ options.to ~ ' as ' ~ scope.type ~ ') as string) as upper_bound'
        ).rows[0] -%}
        {%- do lakehouse_patterns.require(
            bounds[0] is not none and bounds[1] is not none and bounds[0] < bounds[1],
            'from must lie before to and both must be of type ' ~ scope.type ~ ', got '
            ~ options.from ~ ' and ' ~ options.to
        ) -%}
        {%- do scope.update({
            'run': bounds[0],
            'interval': scope.period ~ ' >= ' ~ lakehouse_patterns._awap_literal(bounds[0], scope.type)
            ~ ' and ' ~ scope.period ~ ' < ' ~ lakehouse_patterns._awap_literal(bounds[1], scope.type),
        }) -%}
    {%- endif -%}
    {{ return(scope) }}
{% endmacro %}


{#- Audit 2: the staged rows, in one scan ---------------------------------------------------------------------- -#}

{% macro _awap_measure(options, scope) %}
    {#-
        One dict a period (without `period`: one in all) and audit: run, row_count, audit, value, baseline. One without
        `audit` is a period of which nothing but deleted rows is staged: there is nothing to measure, it goes.
    -#}
    {%- set measured = [] -%}
    {%- for row in run_query(lakehouse_patterns._awap_audit_sql(options, scope)).rows -%}
        {%- do measured.append(fromjson(row[0])) -%}
    {%- endfor -%}
    {%- if not measured and scope.interval -%}
        {#- Nothing staged and nothing published in [from, to): one period of no rows. -#}
        {%- for audit in options.audits -%}
            {%- do measured.append({'run': scope.run, 'row_count': 0, 'is_in_interval': true, 'audit': audit.name}) -%}
        {%- endfor -%}
    {%- endif -%}
    {{ return(measured) }}
{% endmacro %}


{% macro _awap_audit_sql(options, scope) %}
    {#-
        The one scan: every audit's value for every staged period, as JSON, so that no driver guesses types.
        A period that is published within [from, to) and not staged any more counts as one of no rows.
    -#}
    {%- set changes = options.audits | selectattr('type', 'equalto', 'change') | map(attribute='name') | list -%}
with staged as (
    select
        {{ 'cast(' ~ scope.period ~ ' as string)' if options.period else "'" ~ scope.run ~ "'" }} as run,
        count(*) as row_count,
        {{ 'coalesce(bool_and(' ~ scope.interval ~ '), false)' if scope.interval else 'true' }} as is_in_interval
        {%- for audit in options.audits %},
        try_cast({{ audit.value }} as double) as value_{{ loop.index }}
        {%- endfor %}
    from {{ scope.rows }}
    {%- if options.period %}
    group by {{ scope.period }}
    {%- endif %}
),

{% if scope.interval and scope.target -%}
emptied as (
    select distinct cast({{ scope.period }} as string) as run
    from {{ scope.target }}
    where {{ scope.interval }}
),

periods as (
    select
        coalesce(staged.run, emptied.run) as run,
        coalesce(staged.row_count, 0) as row_count,
        coalesce(staged.is_in_interval, emptied.run is not null) as is_in_interval
        {%- for audit in options.audits %},
        staged.value_{{ loop.index }}
        {%- endfor %}
    from staged
    full outer join emptied on staged.run = emptied.run
),

{% else -%}
periods as (
    select * from staged
),

{% endif -%}
staged_values as (
    select
        run,
        row_count,
        is_in_interval,
        true as is_staged,
        audit,
        value
    from periods
    lateral view stack(
        {{ options.audits | length }}
        {%- for audit in options.audits %},
        '{{ lakehouse_patterns._awap_escape(audit.name) }}', value_{{ loop.index }}
        {%- endfor %}
    ) as audit, value
),

{% if changes -%}
known_values as (
    select * from staged_values
    {%- if scope.results.columns %}
    union all
    select
        run,
        cast(null as bigint) as row_count,
        true as is_in_interval,
        false as is_staged,
        audit,
        value
    from {{ scope.results.relation }}
    where
        audit in (
            {%- for name in changes %}'{{ lakehouse_patterns._awap_escape(name) }}'{{ ', ' if not loop.last }}{% endfor -%}
        )
    {%- endif %}
),

-- A rerun compares with the periods before it, never with its own earlier result.
deduplicated as (
    select
        *,
        max(is_staged) over (partition by audit, run) as is_restaged
    from known_values
),

followed as (
    select
        *,
        array_sort(collect_list(value) over (
            partition by audit order by run
            rows between {{ options.history }} preceding and 1 preceding
        )) as earlier
    from deduplicated
    where is_staged or not is_restaged
),

-- The median: one exceptional period neither hides the next drop nor raises an alarm after it.
measured as (
    select
        * except (earlier),
        (
            get(earlier, shiftright(size(earlier) - 1, 1))
            + get(earlier, shiftright(size(earlier), 1))
        ) / 2 as baseline
    from followed
    where is_staged
)
{%- else -%}
measured as (
    select
        *,
        cast(null as double) as baseline
    from staged_values
)
{%- endif %}

select to_json(struct(run, row_count, is_in_interval, audit, value, baseline)) as measured
from measured
{%- if options.is_deleted %}

union all

select to_json(struct(cast({{ scope.period }} as string) as run, count(*) as row_count, true as is_in_interval)) as measured
from {{ scope.staging }}
group by {{ scope.period }}
having bool_and({{ adapter.quote(options.is_deleted) }})
{%- endif %}
{% endmacro %}


{% macro _awap_findings(options, scope, measured) %}
    {#-
        Judges each measured value. Returns `results` (what is recorded of published periods), `rejected` (periods
        of which nothing is published, with the audits that say so), `periods` (all), `deleted` (those of them that
        have no rows any more), `messages` (one for each issue), whether the run `has_rejects` and whether it must `fail` before or `error` after publishing.
    -#}
    {%- set found = {
        'results': [], 'rejected': {}, 'periods': [], 'deleted': [], 'messages': [],
        'has_rejects': false, 'fail': false, 'error': false,
    } -%}
    {%- set audits = {} -%}
    {%- for audit in options.audits -%}
        {%- do audits.update({audit.name: audit}) -%}
    {%- endfor -%}
    {%- set results = [] -%}
    {%- for row in measured -%}
        {%- set audit = audits.get(row.get('audit')) -%}
        {%- if row.get('run') is none or not row.is_in_interval -%}
            {%- set message = row.row_count ~ ' rows have '
                ~ (options.period ~ ' ' ~ row.run ~ ', outside ' ~ scope.interval if row.get('run') is not none
                   else 'NULL in the period column ' ~ options.period) -%}
            {%- do found.messages.append(message) if message not in found.messages -%}
            {%- do found.update({'fail': true}) -%}
        {%- elif not row.get('audit') -%}
            {%- do found.periods.append(row.run) -%}
            {%- do found.deleted.append(row.run) -%}
        {%- else -%}
            {%- set result = lakehouse_patterns._awap_judge(audit, row) -%}
            {%- do found.periods.append(row.run) if row.run not in found.periods -%}
            {%- do results.append(result) -%}
            {%- if audit.outcome == 'dispatch' and (result.issue or audit.type == 'record' and result.value) -%}
                {%- do found.update({'has_rejects': true}) -%}
            {%- endif -%}
            {%- if result.issue -%}
                {%- do found.messages.append(
                    "Audit '" ~ audit.name ~ "' (" ~ audit.outcome ~ ', ' ~ row.run ~ '): ' ~ result.issue
                ) -%}
                {%- do found.update({'fail': found.fail or audit.outcome == 'fail'}) -%}
                {%- do found.update({'error': found.error or audit.severity == 'error'}) -%}
                {%- if audit.outcome == 'dispatch' -%}
                    {%- do found.rejected.setdefault(row.run, []).append(audit.name) -%}
                {%- endif -%}
            {%- endif -%}
        {%- endif -%}
    {%- endfor -%}
    {%- for result in results if result.run not in found.rejected -%}
        {%- do found.results.append(result) -%}
    {%- endfor -%}
    {{ return(found) }}
{% endmacro %}


{% macro _awap_judge(audit, row) %}
    {#- One row of the audit results; `issue` is none when the measured value is within its bounds. -#}
    {%- set value, baseline, detail = row.get('value'), row.get('baseline'), '' -%}
    {%- if audit.type == 'row_count' -%}
        {%- set value, measured, what = row.row_count, row.row_count, 'the number of rows' -%}
    {%- elif audit.type in ('record', 'null_share') -%}
        {%- set value = value or 0 -%}
        {%- set measured = value / row.row_count if row.row_count else 0 -%}
        {%- set what = 'the share of rows '
            ~ ('with NULL in ' ~ audit.column if audit.column else 'that do not hold ' ~ audit.valid_when) -%}
        {%- set detail = ' (' ~ (value | int) ~ ' of ' ~ row.row_count ~ ')' -%}
    {%- elif audit.type == 'change' -%}
        {#- Without history, or from zero, there is no change to speak of. -#}
        {%- set measured = value / baseline - 1 if value is not none and baseline else none -%}
        {%- set what, detail = 'the change of ' ~ audit.value, ' (' ~ value ~ ' after ' ~ baseline ~ ')' -%}
    {%- else -%}
        {%- set measured, what = value, audit.value -%}
    {%- endif -%}

    {%- if measured is none -%}
        {%- set is_met, shown = audit.type == 'change' and not baseline, 'NULL' -%}
    {%- else -%}
        {%- set is_met = (audit.min is none or measured >= audit.min) and (audit.max is none or measured <= audit.max) -%}
        {%- set shown = measured | int if measured == measured | int else measured | round(4) -%}
    {%- endif -%}
    {%- set bounds = [] -%}
    {%- do bounds.append('at least ' ~ audit.min) if audit.min is not none -%}
    {%- do bounds.append('at most ' ~ audit.max) if audit.max is not none -%}
    {%- set threshold = bounds | join(' and ') -%}
    {{ return({
        'run': row.run,
        'audit': audit.name,
        'column_name': audit.column,
        'issue': none if is_met else what ~ ' is ' ~ shown ~ detail ~ ', allowed ' ~ threshold,
        'value': value,
        'measured': measured,
        'threshold': threshold,
        'outcome': audit.outcome,
        'severity': audit.severity,
    }) }}
{% endmacro %}


{#- Publish: rejected rows, audit results, the table ------------------------------------------------------------- -#}

{% macro _awap_write_rejects(options, scope, findings) %}
    {%- if options.dispatches and (findings.periods or not scope.target) -%}
        {%- call statement('write_rejects') -%}
            {%- if scope.target and scope.rejects.columns -%}
            {%- set columns = lakehouse_patterns._awap_add_columns(scope.rejects, scope.columns) -%}
            insert into {{ scope.rejects.relation }}
            replace where {{ lakehouse_patterns._awap_condition(scope, findings.periods) }}
            select {{ columns | join(', ') }}
            {%- else -%}
            create or replace table {{ scope.rejects.relation }}
            using delta
            {{ lakehouse_patterns._awap_location(scope.rejects.relation) }}
            as
            select *
            {%- endif %}
            from ({{ lakehouse_patterns._awap_judged_rows(options, scope, findings) }})
            {#- What the audit found tells already that there are none: no second scan. #}
            where {{ 'size(rejected_by) > 0' if findings.has_rejects else 'false' }}
        {%- endcall -%}
    {%- endif -%}
{% endmacro %}


{% macro _awap_judged_rows(options, scope, findings) %}
    {#- The staged rows with the names of the dispatching audits that reject them: the row's own, then its period's. -#}
select
    staged.*,
    {{ 'cast(staged.' ~ scope.period ~ ' as string)' if options.period else "'" ~ scope.run ~ "'" }} as audit_run,
    array_distinct(concat(
        array_compact(array(
            cast(null as string)
            {%- for audit in options.audits if audit.type == 'record' and audit.outcome == 'dispatch' %},
            case when ({{ audit.valid_when }}) is not true then '{{ lakehouse_patterns._awap_escape(audit.name) }}' end
            {%- endfor %}
        )),
        case
            {%- for run, names in findings.rejected.items() %}
            when {{ 'staged.' ~ scope.period ~ ' = ' ~ lakehouse_patterns._awap_literal(run, scope.type)
                    if options.period else 'true' }} then array(
                {%- for name in names %}'{{ lakehouse_patterns._awap_escape(name) }}'{{ ', ' if not loop.last }}{% endfor -%}
            )
            {%- endfor %}
            when false then array('')
            else array_compact(array(cast(null as string)))
        end
    )) as rejected_by
from {{ scope.rows }} as staged
{% endmacro %}


{% macro _awap_add_columns(table, columns) %}
    {#- Adds what the table lacks and returns its select list: a column that the model no longer has is NULL. -#}
    {%- set known, selected, added = {}, [], [] -%}
    {%- set staged = columns | map(attribute='name') | map('lower') | list + ['audit_run', 'rejected_by'] -%}
    {%- for column in table.columns -%}
        {%- do known.update({column.name | lower: column}) -%}
        {%- do selected.append(
            adapter.quote(column.name) if column.name | lower in staged
            else 'cast(null as ' ~ column.dtype ~ ') as ' ~ adapter.quote(column.name)
        ) -%}
    {%- endfor -%}
    {%- for column in columns if column.name | lower not in known -%}
        {%- do added.append(adapter.quote(column.name) ~ ' ' ~ column.dtype) -%}
        {%- do selected.append(adapter.quote(column.name)) -%}
    {%- endfor -%}
    {%- if added -%}
        {%- do run_query('alter table ' ~ table.relation ~ ' add columns (' ~ (added | join(', ')) ~ ')') -%}
    {%- endif -%}
    {{ return(selected) }}
{% endmacro %}


{% macro _awap_write_results(options, scope, findings) %}
    {%- set listed = [] -%}
    {%- for run in findings.results | map(attribute='run') | unique | list + findings.deleted -%}
        {%- do listed.append("'" ~ lakehouse_patterns._awap_escape(run) ~ "'") -%}
    {%- endfor -%}
    {%- if findings.results -%}
        {%- call statement('write_results') -%}
            {%- if scope.results.columns and (scope.target or not options.period) -%}
            insert into {{ scope.results.relation }}
            replace where run in ({{ listed | join(', ') }})
            {%- else -%}
            create or replace table {{ scope.results.relation }}
            using delta
            {{ lakehouse_patterns._awap_location(scope.results.relation) }}
            as
            {%- endif %}
            {{ lakehouse_patterns._awap_results_sql(findings.results) }}
        {%- endcall -%}
    {%- elif listed and scope.results.columns -%}
        {%- do run_query('delete from ' ~ scope.results.relation ~ ' where run in (' ~ (listed | join(', ')) ~ ')') -%}
    {%- endif -%}
{% endmacro %}


{% macro _awap_results_sql(results) %}
    {#- One row a period and audit; `format_version` is raised whenever the columns change their meaning. -#}
select
    cast(dataset as string) as dataset,
    cast(run as string) as run,
    cast(audit as string) as audit,
    cast(column_name as string) as column_name,
    cast(issue as string) as issue,
    try_cast(value as double) as value,
    try_cast(measured as double) as measured,
    cast(threshold as string) as threshold,
    cast(outcome as string) as outcome,
    cast(severity as string) as severity,
    timestamp '{{ run_started_at.strftime("%Y-%m-%d %H:%M:%S.%f") }}' as audited_at,
    1 as format_version
from values
    {%- for result in results %}
    (
        '{{ this.schema }}.{{ this.identifier }}',
        {%- for name in ['run', 'audit', 'column_name', 'issue', 'value', 'measured', 'threshold', 'outcome', 'severity'] %}
        {%- set cell = result[name] %}
        {{ 'null' if cell is none else "'" ~ lakehouse_patterns._awap_escape(cell) ~ "'" }}{{ ',' if not loop.last }}
        {%- endfor %}
    ){{ ',' if not loop.last }}
    {%- endfor %}
    as result (dataset, run, audit, column_name, issue, value, measured, threshold, outcome, severity)
{%- endmacro %}


{% macro _awap_publish(options, scope, findings) %}
    {#- One commit or none. Returns whether the whole table was replaced. -#}
    {%- set accepted = findings.periods | reject('in', findings.rejected) | list -%}
    {%- set keeps_published = scope.existing is not none and scope.existing.is_delta and not should_full_refresh() -%}
    {%- if not accepted and keeps_published -%}
        {%- call noop_statement('main', 'NOTHING TO PUBLISH') -%}{%- endcall -%}
        {{ return(false) }}
    {%- endif -%}

    {%- set rows -%}
        {%- if findings.has_rejects -%}
from ({{ lakehouse_patterns._awap_judged_rows(options, scope, findings) }})
where size(rejected_by) = 0
        {%- else -%}
from {{ scope.rows }}
        {%- endif -%}
    {%- endset -%}
    {%- if scope.target -%}
        {%- do process_schema_changes(
            incremental_validate_on_schema_change(config.get('on_schema_change'), default='ignore'),
            scope.staging,
            scope.target
        ) -%}
        {%- set columns = adapter.get_columns_in_relation(scope.target) | map(attribute='quoted') | join(', ') -%}
        {%- call statement('main') -%}
            insert into {{ scope.target }}
            replace where {{ lakehouse_patterns._awap_condition(scope, accepted, findings.rejected.keys() | list) }}
            select {{ columns }}
            {{ rows }}
        {%- endcall -%}
        {{ return(false) }}
    {%- endif -%}

    {%- if scope.existing is not none and not (scope.existing.is_table and scope.existing.is_delta) -%}
        {%- do adapter.drop_relation(scope.existing) -%}
    {%- endif -%}
    {%- set columns = scope.columns | map(attribute='quoted') | join(', ') -%}
    {%- call statement('main') -%}
        {{ create_table_as(false, this, 'select ' ~ columns ~ '\n' ~ rows) }}
    {%- endcall -%}
    {%- do persist_constraints(this, model) -%}
    {{ return(true) }}
{% endmacro %}


{% macro _awap_condition(scope, periods, except=[]) %}
    {#- The rows of some periods: all of `[from, to)` except some where an interval is given, else those listed. -#}
    {%- set listed = [] -%}
    {%- for run in (except if scope.interval else periods) -%}
        {%- do listed.append(lakehouse_patterns._awap_literal(run, scope.type)) -%}
    {%- endfor -%}
    {%- if scope.interval -%}
{{ scope.interval }}{{ ' and ' ~ scope.period ~ ' not in (' ~ (listed | join(', ')) ~ ')' if listed }}
    {%- else -%}
{{ scope.period }} in ({{ listed | join(', ') }})
    {%- endif -%}
{% endmacro %}


{#- Names and literals --------------------------------------------------------------------------------------------- -#}

{% macro _awap_companion(suffix) %}
    {#-
        A table beside the model's own: its relation and its columns, none before its first write. No node declares
        it, so this statement is also what registers it again, from its path, after the metastore was lost.
    -#}
    {%- set relation = this.incorporate(path={'identifier': this.identifier ~ suffix}, type='table') -%}
    {%- do run_query(
        'create table if not exists ' ~ relation ~ ' using delta ' ~ lakehouse_patterns._awap_location(relation)
    ) -%}
    {{ return({'relation': relation, 'columns': adapter.get_columns_in_relation(relation)}) }}
{% endmacro %}


{% macro _awap_location(relation) %}
    {%- if config.get('location_root') -%}
location '{{ config.get('location_root') }}/{{ relation.identifier }}'
    {%- endif -%}
{% endmacro %}


{% macro _awap_literal(value, data_type) %}
    {{ return("cast('" ~ lakehouse_patterns._awap_escape(value) ~ "' as " ~ data_type ~ ')') }}
{% endmacro %}


{% macro _awap_escape(text) %}
    {{ return(text | string | replace('\\', '\\\\') | replace("'", "\\'")) }}
{% endmacro %}


{% test audit_within(model, audit, min=none, max=none) %}
    {#- A reader's own threshold on what the publisher measured: fails for each period beyond it, and when nothing was. -#}
    {%- do lakehouse_patterns.require(
        min is not none or max is not none, 'audit_within needs a bound: min, max or both'
    ) -%}
    {%- set results = model.incorporate(path={'identifier': model.identifier ~ '__audit_results'}) -%}
select
    run,
    measured,
    threshold as threshold_of_publisher
from {{ results }}
where
    audit = '{{ lakehouse_patterns._awap_escape(audit) }}'
    and ({{ 'measured < ' ~ min if min is not none else 'false' }} or {{ 'measured > ' ~ max if max is not none else 'false' }})

union all

select
    'never audited' as run,
    cast(null as double) as measured,
    cast(null as string) as threshold_of_publisher
from {{ results }}
having count_if(audit = '{{ lakehouse_patterns._awap_escape(audit) }}') = 0
{% endtest %}
