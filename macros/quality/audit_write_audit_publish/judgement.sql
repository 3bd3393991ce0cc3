{#- Audit-Write-Audit-Publish: measured values against their bounds, and what follows for each period. -#}

{% macro _awap_findings(options, scope, measured) %}
    {#-
        Judges each measured value. Returns `results` (what is recorded of published periods), `rejected` (periods of
        which nothing is published, with the audits that say so), `periods` (all), `deleted` (those of them that have no
        rows any more), `messages` (one for each issue), whether the run `has_rejects`, and whether it must `fail` before
        publishing or end with an `error` after it.
    -#}
    {%- set found = {
        'results': [], 'rejected': {}, 'periods': [], 'deleted': [], 'messages': [],
        'has_rejects': false, 'fail': false, 'error': false,
    } -%}
    {%- set audits, judged = {}, [] -%}
    {%- for audit in scope.audits -%}
        {%- do audits.update({audit.name: audit}) -%}
    {%- endfor -%}
    {%- for row in measured -%}
        {%- set audit = audits.get(row.get('audit')) -%}
        {%- if row.get('run') is none or not row.is_in_interval -%}
            {%- set message = row.row_count ~ ' rows have '
                ~ (options.period ~ ' ' ~ row.run ~ ', outside ' ~ scope.interval if row.get('run') is not none
                   else 'NULL in the period column ' ~ options.period) -%}
            {%- do found.messages.append(message) if message not in found.messages -%}
            {%- do found.update({'fail': true}) -%}
        {%- else -%}
            {%- do found.periods.append(row.run) if row.run not in found.periods -%}
            {%- if audit -%}
                {%- do judged.append(lakehouse_patterns._awap_judge(audit, row)) -%}
                {%- do lakehouse_patterns._awap_reject(found, audit, judged[-1]) -%}
            {%- else -%}
                {%- do found.deleted.append(row.run) -%}
            {%- endif -%}
        {%- endif -%}
    {%- endfor -%}
    {#- Rows of a rejected period aren't published, whether they break the contract or not. -#}
    {%- for result in judged if audits[result.audit].type != 'contract' or result.run not in found.rejected -%}
        {%- do lakehouse_patterns._awap_note(found, audits[result.audit], result) -%}
    {%- endfor -%}
    {{ return(found) }}
{% endmacro %}


{% macro _awap_reject(found, audit, result) %}
    {%- if audit.outcome == 'dispatch' -%}
        {%- if result.issue or (audit.type == 'record' and result.value) -%}
            {%- do found.update({'has_rejects': true}) -%}
        {%- endif -%}
        {%- if result.issue -%}
            {%- do found.rejected.setdefault(result.run, []).append(audit.name) -%}
        {%- endif -%}
    {%- endif -%}
{% endmacro %}


{% macro _awap_note(found, audit, result) %}
    {%- if result.issue -%}
        {%- do found.messages.append(
            "Audit '" ~ audit.name ~ "' (" ~ audit.outcome ~ ', ' ~ result.run ~ '): ' ~ result.issue
        ) -%}
        {%- do found.update({'fail': found.fail or audit.outcome == 'fail'}) -%}
        {%- do found.update({'error': found.error or audit.severity == 'error'}) -%}
    {%- endif -%}
    {%- if audit.type != 'contract' and result.run not in found.rejected -%}
        {%- do found.results.append(result) -%}
    {%- endif -%}
{% endmacro %}


{% macro _awap_judge(audit, row) %}
    {#-
        One row of the audit results; `issue` is none when the measured value is within its bounds. JSON has no NaN and
        no infinity: they arrive as texts, and are within no bounds.
    -#}
    {%- set value, baseline, detail = row.get('value'), row.get('baseline'), '' -%}
    {%- set measured = value -%}
    {%- if audit.type == 'row_count' -%}
        {%- set value, measured, what = row.row_count, row.row_count, 'the number of rows' -%}
    {%- elif audit.type in ('record', 'null_share') -%}
        {%- set value = value or 0 -%}
        {%- set measured = value / row.row_count if row.row_count else 0 -%}
        {%- set what = 'the share of rows '
            ~ ('with NULL in ' ~ audit.column if audit.column else 'that do not hold ' ~ audit.valid_when) -%}
        {%- set detail = ' (' ~ (value | int) ~ ' of ' ~ row.row_count ~ ')' -%}
    {%- elif audit.type == 'contract' -%}
        {%- set measured, what = value or 0, 'the number of rows that do not hold ' ~ audit.condition -%}
    {%- elif audit.type == 'change' -%}
        {#- A share of the baseline's size, so that a rise from a negative baseline is a rise. -#}
        {%- if value is none or lakehouse_patterns._is_finite(value) -%}
            {%- set measured = (value - baseline) / (baseline | abs) if value is not none and baseline else none -%}
            {%- set measured = 0 if value == 0 and baseline == 0 else measured -%}
        {%- endif -%}
        {%- set what, detail = 'the change of ' ~ audit.expression, ' (' ~ value ~ ' after ' ~ baseline ~ ')' -%}
    {%- else -%}
        {%- set what = audit.expression -%}
    {%- endif -%}

    {%- if measured is none -%}
        {#- Without history nobody can judge a change; from zero every change is infinite, and fails. -#}
        {%- set is_met = audit.type == 'change' and baseline is none -%}
        {%- set shown = 'infinite' if value is not none and baseline == 0 else 'NULL' -%}
    {%- elif not lakehouse_patterns._is_finite(measured) -%}
        {%- set is_met, shown = false, measured -%}
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
