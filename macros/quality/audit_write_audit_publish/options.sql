{#- Audit-Write-Audit-Publish: a model's options and audits, checked and completed. -#}

{% macro _awap_options(given) %}
    {%- do lakehouse_patterns.require_pattern_options('awap', given) -%}
    {%- set has_from, has_to = given.get('from') is not none, given.get('to') is not none -%}
    {%- set history = given.get('history', 7) -%}
    {%- do lakehouse_patterns.require(given.get('audits'), 'awap needs audits, a list of at least one') -%}
    {%- do lakehouse_patterns.require(
        has_from == has_to and (not has_from or given.get('period')),
        'awap takes from and to together, and with a period column'
    ) -%}
    {%- do lakehouse_patterns.require(
        not given.get('is_deleted') or (given.get('period') and not has_from),
        'awap takes is_deleted with a period column and without from and to, which say already what is gone'
    ) -%}
    {%- do lakehouse_patterns.require(
        history is integer and history is not boolean and history >= 1,
        'history of awap must be a number of periods from 1 on, got ' ~ history
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
        'input_audits': given.get('input_audits') or [],
        'period': given.get('period'),
        'is_deleted': given.get('is_deleted'),
        'from': given.get('from'),
        'to': given.get('to'),
        'history': history,
        'dispatches': 'dispatch' in audits | map(attribute='outcome'),
    }) }}
{% endmacro %}


{% macro _awap_audit(given) %}
    {#- One audit, checked and completed: what it measures and what is allowed (`min`, `max`). -#}
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
    {%- for key in keys[given.type] -%}
        {%- if key in ('column', 'valid_when', 'expression') -%}
            {%- do lakehouse_patterns.require(given.get(key), what ~ ' of type ' ~ given.type ~ ' needs ' ~ key) -%}
        {%- elif given.get(key) is not none -%}
            {%- do lakehouse_patterns._awap_require_bound(key ~ ' of ' ~ what, given[key], given.type) -%}
        {%- endif -%}
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
    {%- do lakehouse_patterns.require(
        given.type != 'record' or outcome != 'dispatch' or given.get('max_invalid_share') is not none,
        what ~ ' dispatches invalid rows and needs max_invalid_share, above which all rows are rejected'
    ) -%}

    {%- set lowest, highest = given.get('min'), given.get('max') -%}
    {%- if given.type == 'record' -%}
        {%- set highest = given.get('max_invalid_share') or 0 -%}
    {%- endif -%}
    {%- do lakehouse_patterns.require(
        lowest is not none or highest is not none, what ~ ' needs a bound: min, max or both'
    ) -%}
    {{ return({
        'name': given.name,
        'type': given.type,
        'column': given.get('column'),
        'valid_when': given.get('valid_when'),
        'expression': given.get('expression'),
        'min': lowest,
        'max': highest,
        'outcome': outcome,
        'severity': severity,
    }) }}
{% endmacro %}


{% macro _awap_require_bound(what, bound, type) %}
    {#- A bound that is no number, or a share above 1 as in percent, would let everything pass. -#}
    {%- do lakehouse_patterns.require(
        lakehouse_patterns._is_finite(bound), what ~ " must be a number, got '" ~ bound ~ "'"
    ) -%}
    {%- do lakehouse_patterns.require(
        type not in ('null_share', 'record') or 0 <= bound <= 1,
        what ~ ' must be a share between 0 and 1, got ' ~ bound
    ) -%}
{% endmacro %}


{% macro _awap_contract_audits(dispatches) %}
    {#-
        The constraints of the model's contract as audits: a row that breaks one would end the publishing statement,
        after rejects and results are written, or be published with a new table before it has its constraints. Rows that
        a `record` audit dispatches are not published, and may break them.
    -#}
    {%- set found = [] -%}
    {%- for name, condition in lakehouse_patterns.contract_checks().items() -%}
        {%- do found.append({
            'name': 'constraint ' ~ name,
            'type': 'contract',
            'condition': condition,
            'kept': ' and size(lakehouse_patterns_rejected_by) = 0' if dispatches else '',
            'min': none,
            'max': 0,
            'outcome': 'fail',
            'severity': 'error',
        }) -%}
    {%- endfor -%}
    {{ return(found) }}
{% endmacro %}
