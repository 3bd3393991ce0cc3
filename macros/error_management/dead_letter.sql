{#-
    Dead-Letter in SQL. SQL has no try/catch: an error-safe function returns NULL on an error. So each
    transformation's output is compared with its inputs: a NULL output is an error if an input isn't NULL. A NULL
    output is valid if all inputs are NULL.

    Materialize the flagged relation as a table: both models that read it then use the same evaluation.

    Check how each function handles errors: `concat`, `try_cast`, `try_to_timestamp` and `from_json` return NULL in
    both ANSI modes; `cast` and `to_timestamp` raise with ANSI on; `concat_ws` skips NULLs and never shows the error;
    `from_json` and `get_json_object` drop what follows the first object of a line.
-#}

{% macro dead_letter_flags(relation, transformations) %}
    {{ return(adapter.dispatch('dead_letter_flags', 'lakehouse_patterns')(relation, transformations)) }}
{% endmacro %}

{% macro default__dead_letter_flags(relation, transformations) %}
    {%- do lakehouse_patterns._require_transformations(transformations) -%}
    {%- set own = ['error_class', 'error_message'] -%}
    {%- set types = lakehouse_patterns.known_types(relation) -%}
    {%- do lakehouse_patterns.require_free_names(types, own, 'dead_letter_flags') -%}
    {%- for t in transformations -%}
        {%- do lakehouse_patterns.require(
            lakehouse_patterns.column_name(types, t.name) is none and lakehouse_patterns.column_name(own, t.name) is none,
            "the transformation '" ~ t.name ~ "' adds a column of its name, which the result has already: give it "
            ~ 'another name'
        ) -%}
        {%- do own.append(t.name) -%}
    {%- endfor -%}
select
    *,
    case
        {%- for t in transformations %}
        when {{ lakehouse_patterns._is_dead(t) }} then 'NULL_RESULT'
        {%- endfor %}
    end as error_class,
    case
        {%- for t in transformations %}
        when {{ lakehouse_patterns._is_dead(t) }}
            then {{ lakehouse_patterns.text_literal(
                t.name ~ ' is NULL although an input is present (' ~ (t.inputs | join(', ')) ~ ')'
            ) }}
        {%- endfor %}
    end as error_message
from (
    select
        *,
        {%- for t in transformations %}
        {{ t.expression }} as {{ lakehouse_patterns.quoted_name(t.name) }}{{ ',' if not loop.last }}
        {%- endfor %}
    from {{ relation }}
)
{%- endmacro %}

{% macro _is_dead(transformation) %}
    {%- set inputs = lakehouse_patterns.quoted_names(transformation.inputs) -%}
    {{ return(
        lakehouse_patterns.quoted_name(transformation.name) ~ ' is null and (' ~ (inputs | join(' is not null or '))
        ~ ' is not null)'
    ) }}
{% endmacro %}

{% macro _require_transformations(transformations) %}
    {%- do lakehouse_patterns.require(
        transformations is sequence and transformations is not string and transformations | length > 0,
        'transformations must be a list of {name, expression, inputs}, got ' ~ transformations
    ) -%}
    {%- for t in transformations -%}
        {%- do lakehouse_patterns.require_known_keys(
            'a transformation', t, ['name', 'expression', 'inputs']
        ) -%}
        {%- do lakehouse_patterns.require(
            t.name and t.expression and t.inputs is sequence and t.inputs is not string
            and t.inputs | length > 0,
            'a transformation needs name, expression and a list of inputs, got ' ~ t
        ) -%}
    {%- endfor -%}
{% endmacro %}

{% macro dead_letter_valid_rows(flagged) %}
    {{ return(adapter.dispatch('dead_letter_valid_rows', 'lakehouse_patterns')(flagged)) }}
{% endmacro %}

{% macro default__dead_letter_valid_rows(flagged) -%}
select * except (error_class, error_message)
from {{ flagged }}
where error_class is null
{%- endmacro %}

{% macro dead_letter_rows(flagged, job_name=none, job_version='1', processed_at=none) %}
    {{ return(adapter.dispatch('dead_letter_rows', 'lakehouse_patterns')(
        flagged, job_name, job_version, processed_at
    )) }}
{% endmacro %}

{% macro default__dead_letter_rows(flagged, job_name, job_version, processed_at) -%}
    {%- do lakehouse_patterns.require_free_names(
        lakehouse_patterns.known_types(flagged), ['job_name', 'job_version', 'processed_at'], 'dead_letter_rows'
    ) -%}
select
    *,
    {{ lakehouse_patterns.text_literal(job_name or this.identifier) }} as job_name,
    {{ lakehouse_patterns.text_literal(job_version) }} as job_version,
    {{ lakehouse_patterns._given_or_run_start('processed_at', processed_at) }} as processed_at
from {{ flagged }}
where error_class is not null
{%- endmacro %}

{% test dead_letter_share(model, max_share=0.1, min_records=100) %}
    {{ lakehouse_patterns.dead_letter_share_failures(model, max_share, min_records) }}
{% endtest %}

{% macro dead_letter_share_failures(flagged, max_share, min_records) %}
    {{ return(adapter.dispatch('dead_letter_share_failures', 'lakehouse_patterns')(
        flagged, max_share, min_records
    )) }}
{% endmacro %}

{% macro default__dead_letter_share_failures(flagged, max_share, min_records) %}
    {%- do lakehouse_patterns.require(
        lakehouse_patterns._is_finite(max_share) and 0 <= max_share <= 1,
        'max_share must be a share between 0 and 1, got ' ~ max_share
    ) -%}
    {%- do lakehouse_patterns.require(
        lakehouse_patterns._is_finite(min_records) and min_records >= 0,
        'min_records must be a number of records from 0 on, got ' ~ min_records
    ) -%}
select
    count(*) as records,
    count(error_class) as dead_letters,
    try_divide(count(error_class), count(*)) as dead_letter_share
from {{ flagged }}
having count(*) >= {{ min_records }} and try_divide(count(error_class), count(*)) > {{ max_share }}
{%- endmacro %}
